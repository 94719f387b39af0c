"""A run that is saved, ended, loaded and continued is the run that went on: the same weights in every step, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from harness import Case, Recorder, Run, make_trainer, snapshot
from lightning_zenflow import ZenFlowStrategy
from scripted_pace import scripted

EVERYTHING = {
    "look_ahead": "auto",
    "provisional_scale": "auto",
    "select_interval": 3,
    "select_strategy": "random_selection:choose",
}
CASES = {
    "defaults, fixed S": Case(
        strategy_options={"look_ahead": "auto", "provisional_scale": "auto", "select_interval": "auto"}
    ),
    "random selection": Case(topk_ratio=0.3, publish_lag=2, strategy_options=EVERYTHING),
    "bf16, accumulated, clipped": Case(
        topk_ratio=0.3, precision="bf16-true", accumulate=2, max_norm=1.0, strategy_options=EVERYTHING
    ),
    "mean gradients": Case(
        topk_ratio=0.3, max_norm=1.0, strategy_options={**EVERYTHING, "deferred_update": "accumulate"}
    ),
    "offload": Case(topk_ratio=0.3, strategy_options={**EVERYTHING, "offload": True}),
    "warm-up": Case(topk_ratio=0.3, warm_up=5, strategy_options=EVERYTHING),
    "nothing on the device": Case(topk_ratio=0.0, strategy_options={"look_ahead": "auto", "provisional_scale": "auto"}),
}
STEPS = 18


class SaveAt(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self._step = step
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and not self._path.exists():
            trainer.save_checkpoint(self._path)


def train(
    case: Case, *, steps: int = STEPS, save_at: int = 0, path: Path | None = None, resume: Path | None = None
) -> tuple[Run, list[Tensor], pl.Trainer]:
    """Runs a case; returns what was shown and the weights at the end."""
    run, model = Run(), replace(case, steps=STEPS).make_model()
    callbacks: list[pl.Callback] = [Recorder(case, run)]
    if path is not None:
        callbacks.append(SaveAt(save_at, path))
    trainer = make_trainer(
        case.make_strategy(),
        max_steps=steps,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.max_norm,
        precision=case.precision,
        callbacks=callbacks,
    )
    trainer.fit(model, ckpt_path=None if resume is None else str(resume))
    return run, snapshot(model), trainer


def assert_continues(whole: Run, rest: Run, saved_at: int) -> None:
    assert len(rest.shown) == len(whole.shown) - saved_at
    for step, (ours, theirs) in enumerate(zip(rest.shown, whole.shown[saved_at:], strict=True), saved_at):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), f"step {step}"
    assert rest.losses == whole.losses[saved_at:]


@pytest.mark.parametrize("saved_at", [1, 6, 11])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_bit_for_bit(name: str, saved_at: int, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "half.ckpt"
    whole, weights, _ = train(case, save_at=saved_at, path=path)
    rest, resumed_weights, trainer = train(case, resume=path)
    assert trainer.global_step == STEPS
    assert_continues(whole, rest, saved_at)
    for ours, theirs in zip(resumed_weights, weights, strict=True):
        assert torch.equal(ours, theirs)


def test_the_pace_is_part_of_it(tmp_path: Path) -> None:
    options = {**EVERYTHING, "update_interval": "auto", "publish_lag": "auto"}
    case, path = Case(topk_ratio=0.3, strategy_options=options), tmp_path / "half.ckpt"
    with scripted(((5, 2, 2),)):
        whole, _, _ = train(case, save_at=12, path=path)
    with scripted(()) as built:
        rest, _, trainer = train(case, resume=path)
    assert built[0].pace.update_interval == 2
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert_continues(whole, rest, 12)


@pytest.mark.parametrize("other", [{"topk_ratio": 0.1}, {"update_interval": 2}])
def test_another_configuration_starts_over_from_adamws_state(other: dict[str, Any], tmp_path: Path) -> None:
    case, path = CASES["random selection"], tmp_path / "half.ckpt"
    _, weights, _ = train(case, save_at=6, path=path)
    _, resumed_weights, trainer = train(replace(case, **other), resume=path)
    assert trainer.global_step == STEPS
    # Gradients do not depend on weights, so the exact state is the same whatever the configuration.
    for ours, theirs in zip(resumed_weights, weights, strict=True):
        assert torch.equal(ours, theirs)


def test_skipped_steps_are_remembered(tmp_path: Path) -> None:
    case = replace(CASES["random selection"], model_options={"not_finite": {(3, 0): float("nan")}})
    _, _, _ = train(case, save_at=6, path=tmp_path / "half.ckpt")
    _, _, trainer = train(case, resume=tmp_path / "half.ckpt")
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    optimizer = trainer.strategy.zenflow_optimizer
    assert optimizer is not None
    assert int(optimizer.skipped) == 1
