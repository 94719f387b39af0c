"""The convergence benchmark: its reports, its tasks and optimizers, and two short runs from end to end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import records, report
from benchmarks.convergence.optimizers import DelayedOptimizer
from benchmarks.convergence.records import Record, Spec
from benchmarks.convergence.settings import SETTINGS
from benchmarks.convergence.threshold_tasks import TASKS


def record(method: str, seed: int, val_loss: float | None, setting: str, **fields: object) -> Record:
    spec = Spec(setting=setting, method=method, lr=1e-3, seed=seed, steps=SETTINGS[setting].steps)
    loss = [2.0, 1.5, 1.0]
    return Record(spec=spec, commit="abc", versions={"torch": "2"}, val_loss=val_loss, train_loss=loss, **fields)


@pytest.mark.parametrize("setting", ["delay_small", "recall", "fast"])
def test_every_kind_of_setting_has_a_table(setting: str) -> None:
    losses = {"adamw": 2.0, "delayed_1": 2.4, "zenflow_s1": 1.99, "zenflow_s4": 2.01}
    runs = [
        record(method, i, loss, setting, steps_to_threshold=None if method == "delayed_1" else 100 * (i + 1))
        for method, loss in losses.items()
        for i in (0, 1)
    ]
    shortened = replace(runs[0], spec=replace(runs[0].spec, steps=5))
    failed = record("zenflow_auto", 1, None, setting, error="RuntimeError: a | b\nc")
    tables = report.tables_of([*runs, shortened, failed])
    assert "RuntimeError: a / b c" in tables[setting]
    assert set(tables) == {setting, "delay"} - ({"delay"} if setting == "fast" else set())
    if "delay" in tables:
        (late,) = [line for line in tables["delay"].splitlines() if "AdamW, 1 step late  " in line]
        assert ("not reached" if setting == "recall" else "+20.0 %") in late
    runs[0].initial_weights = "others"
    with pytest.raises(ValueError, match=f"{setting}, seed 0: runs must begin from the same weights"):
        report.tables_of(runs)


@pytest.mark.parametrize("feedback", [False, True])
def test_gradients_are_applied_as_late_as_asked(feedback: bool) -> None:
    """With error feedback, the weights that are shown are moved on by the delay times the last update."""
    late, on_time = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    on_time.load_state_dict(late.state_dict())

    def rule(weights: Sequence[Tensor]) -> Optimizer:
        return torch.optim.AdamW(weights)

    delayed = DelayedOptimizer([late.weight], 0.1, rule=rule, delay=2, error_feedback=feedback)
    reference = DelayedOptimizer([on_time.weight], 0.1, rule=rule, delay=0)
    history = [on_time.weight.detach().clone()] * 3
    for step in range(6):
        gradient = torch.tensor([[1.0 + step, -0.1 * step]])
        late.weight.grad, on_time.weight.grad = gradient, gradient.clone()
        delayed.step()
        reference.step()
        history.append(on_time.weight.detach().clone())
        ahead = 2 * (history[-3] - history[-4]) if step >= 2 and feedback else torch.zeros(1, 2)
        assert torch.equal(late.weight, history[-3] + ahead)


def test_tasks() -> None:
    for make in TASKS.values():
        task = make()
        first, again, other = (task.train(8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
        logits = task.network().logits(first[0])
        assert logits.shape[:-1] == first[1].shape and int(first[1].max()) < logits.shape[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_steps_of_two_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--settings", "fast", "--methods", "adamw,zenflow_s4", "--lrs", "2e-3", "--seeds", "1", "--steps", "5"]
    folders = ["--results", str(tmp_path / "results"), "--cache", str(tmp_path / "cache")]
    assert convergence.main([*arguments, *folders]) == 0
    runs = records.read(tmp_path / "results" / "convergence.jsonl")
    assert [run.error for run in runs] == [None, None]
    assert len({(run.initial_weights, run.data) for run in runs}) == 1
    assert len({run.final_weights for run in runs}) == 2
    assert all(run.val_loss is not None and 2 < run.val_loss < 4 for run in runs)
    with pytest.raises(SystemExit):
        convergence.parse_arguments(["--methods", "adamw,sgd"])
    assert "a method must be one of adamw, adamw_nearest," in capsys.readouterr().err
