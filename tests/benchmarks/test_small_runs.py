"""Benchmarks in a small setting: they run, and write and report what they have measured. Their tables: test_results.py."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.common.processes import run_process
from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import records
from benchmarks.convergence.optimizers import DelayedOptimizer
from benchmarks.glue import __main__ as glue
from benchmarks.kernel.__main__ import measure_replay
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time.run import StepSpec
from tiny_models import save_tiny_model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_step_time_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--params", "13e6", "--asynchronous", "--ranks", "2"]
    arguments += ["--worker-shares", "0.5,0.1"]
    arguments += ["--repeats", "1", "--steps", "4", "--warm-up", "2", "--methods", "zenflow_exact,zenflow_module_order"]
    assert step_time.main([*arguments, "--results", str(tmp_path), "--name", "ranks"]) == 0, capsys.readouterr().out
    runs = json.loads((tmp_path / "ranks.json").read_text())["runs"][0]
    assert [run["spec"]["method"] for run in runs] == 2 * ["zenflow_exact", "zenflow_module_order"]
    assert runs[2]["spec"]["compute_s"] == pytest.approx(5 * runs[0]["spec"]["compute_s"])
    for run in runs:
        assert len(run["stall_s"]) == 4 and run["counted_sizes"] == pytest.approx([0.5, 0.5], rel=0.01)


@pytest.mark.slow
def test_step_time_of_stage_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fetches over a slow link take longer than what is computed."""
    arguments = ["--device", "simulated", "--params", "17e6", "--asynchronous", "--stage", "3", "--share-of", "step"]
    arguments += ["--worker-shares", "0.5", "--repeats", "1", "--steps", "4", "--warm-up", "4", "--pcie", "0.2"]
    arguments += ["--methods", "floor3,zenflow3,zenflow3_clipped", "--results", str(tmp_path), "--name", "stage_3"]
    assert step_time.main(arguments) == 0
    text = capsys.readouterr().out
    runs = json.loads((tmp_path / "stage_3.json").read_text())["runs"][0]
    # Of four layers, the last one is fetched once for both passes.
    fetched_s = 7 * 2 * 4096 * 1024 / 0.2e9
    for run in runs:
        assert min(run["step_s"]) >= fetched_s > run["spec"]["compute_s"]
    assert runs[1]["counted_sizes"] == pytest.approx([1, 7 / 4], abs=0.01)
    assert runs[1]["arena_bytes"] / runs[1]["n_params"] == pytest.approx(16.7, abs=0.2)
    assert "The worker's pass is 50% of step" in text and "by formula" in text


@pytest.mark.slow
def test_step_time_of_residents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device's memory is slow enough for its updates to be seen."""
    arguments = ["--device", "simulated", "--params", "17e6", "--asynchronous", "--compute-ms", "40", "--repeats", "1"]
    arguments += ["--device-memory", "2", "--steps", "4", "--warm-up", "2", "--results", str(tmp_path), "--name", "it"]
    methods = ["floor", "zenflow_exact_ratio_100", "zenflow_exact_ratio_50", "zenflow_adamw_ratio_0"]
    assert step_time.main([*arguments, "--methods", ",".join(methods)]) == 0
    text = capsys.readouterr().out
    runs = json.loads((tmp_path / "it.json").read_text())["runs"][0]
    assert [run["resident_share"] for run in runs] == [None, None, 0.5, 1.0]
    for run in runs[2:]:
        update_s = run["resident_share"] * 28 * run["n_params"] / 2e9
        # The last one's update is still under way at the end.
        assert sum(run["step_s"][1:]) >= 2 * update_s > 6 * run["spec"]["compute_s"] * run["resident_share"]
    assert "by formula ms" in text and "at 2 GB/s, 28 bytes a parameter" in text


@pytest.mark.slow
def test_fsdp2_is_adamw() -> None:
    """With its optimizer in host memory, and with ours, beside DeepSpeed's AdamW without offload; on text, with steps that clip."""
    options: dict[str, Any] = {"params": 25e6, "batch": 2, "narrow": True, "text": True, "warm_up": 2, "steps": 6}
    methods = ("none", "fsdp2", "offload_adamw_fsdp2")
    specs = [StepSpec(device="cpu", method=method, **options) for method in methods]
    without, *fsdp2 = (run_process(step_time.run, spec, timeout=250).losses for spec in specs)
    # The second one rounds bf16 weights the other way now and then.
    for losses, tolerance in zip(fsdp2, (1e-5, 1e-3), strict=True):
        assert losses == pytest.approx(without, rel=tolerance) and len({*losses}) == len(losses) == 8


def test_kernel() -> None:
    jobs = measure_replay(1 << 16, sorted(os.sched_getaffinity(0))[:1])
    assert len(jobs) == 10
    assert {job.steps for job in jobs.values()} == {1, 2, 4, 8, 16}
    assert min(job.ns for job in jobs.values()) > 0


def test_bookkeeping(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The times of steps are measured with a process for each run.
    monkeypatch.setattr(step_time, "run_process", lambda function, spec, **_: function(spec))
    arguments = ["--device", "cpu", "--params", "25e6", "--narrow", "--methods", "floor,zenflow", "--repeats", "1"]
    assert step_time.main([*arguments, "--steps", "5", "--warm-up", "2", "--results", str(tmp_path)]) == 0
    (repeat,) = json.loads((tmp_path / "step_time.json").read_text())["runs"]
    assert [len(run["step_s"]) for run in repeat] == [5, 5]
    assert all(run["n_params"] < 1e6 and min(run["step_s"]) > 0 for run in repeat)
    text = capsys.readouterr().out
    assert "above floor ms" in text and "ZenFlowStrategy, S=4, d=1" in text


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
    assert "a method must be one of adamw, adamw_int8_nearest," in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_runs_leave_a_file_each_and_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i}\tthe plot is {'dull' if i % 2 else 'warm'}\tthe cast\tnot_entailment" for i in range(6)]
    rows[0] = "0\tthe plot\tthe cast\tentailment"
    (tmp_path / "data" / "RTE").mkdir(parents=True)
    for stem in ("train", "dev"):
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows])
        (tmp_path / "data" / "RTE" / f"{stem}.tsv").write_text(f"{text}\n")
    save_tiny_model(tmp_path / "model", "bert", max_position_embeddings=128)
    arguments = ["--data-dir", str(tmp_path / "data"), "--pretrained", str(tmp_path / "model"), "--tasks", "RTE"]
    arguments += ["--methods", "auto,zenflow", "--lrs", "0.001", "--seeds", "1", "--jobs=2", "--results", str(tmp_path)]
    assert glue.main(arguments) == 0
    assert "[2/2, " in capsys.readouterr().out
    found = [json.loads((tmp_path / "glue" / f"RTE_{m}_0.001_1.json").read_text()) for m in ("auto", "zenflow")]
    assert [record["error"] for record in found] == [None, None]
    assert found[0]["initial_weights"] == found[1]["initial_weights"]
    assert all(0 <= record["score"] <= 1 for record in found)
    assert 0 <= found[0]["clipped"] <= 1 and sum(found[1]["schedules"].values()) == 3
    assert glue.main(arguments) == 0
    assert "/2, " not in capsys.readouterr().out
    assert len(list((tmp_path / "glue").iterdir())) == 2
