"""Evaluation, checkpoints and readers of the optimizer's state see exact values, also in the middle of a run."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from gpu_cases import optimizer_of
from harness import Case, make_trainer, snapshot
from models import TestModule
from same_bits import assert_same_tensors

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

CASE = Case(steps=11, topk_ratio=0.05, update_interval=4, publish_lag=1, max_norm=1.0)


def assert_equals(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.detach().double(), b, rtol=1e-6, atol=1e-6)


def fit(model: TestModule, steps: int = CASE.steps, **options: Any) -> pl.Trainer:
    trainer = make_trainer(CASE.make_strategy(), max_steps=steps, gradient_clip_val=CASE.max_norm, **options)
    trainer.fit(model)
    return trainer


def test_evaluation_sees_exact_weights(tmp_path: Path) -> None:
    """After a fit, and from its checkpoint."""
    model = CASE.make_model()
    trainer = fit(model, limit_val_batches=1)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    assert_equals(snapshot(model), CASE.adamw().weights)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    for evaluating in (trainer, make_trainer(CASE.make_strategy(), max_steps=6, limit_val_batches=1)):
        other = CASE.make_model()
        evaluating.test(other, ckpt_path=str(tmp_path / "some.ckpt"), verbose=False)
        assert_same_tensors(snapshot(other), snapshot(model))


class WeightsAtValidation(pl.Callback):
    """Keeps the weights that validation sees."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TestModule)
        self.seen[trainer.global_step] = snapshot(pl_module)


@pytest.mark.parametrize(("accumulate", "interval"), [(1, 3), (3, 2)])
def test_validation_in_mid_run_sees_exact_weights(accumulate: int, interval: int) -> None:
    """Also between the micro-batches of a step."""
    case = replace(CASE, accumulate=accumulate)
    model, callback = case.make_model(), WeightsAtValidation()
    options = {"accumulate_grad_batches": accumulate, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    fit(model, val_check_interval=interval, callbacks=[callback], **options)
    batches = range(0, case.steps * accumulate + 1, interval)
    assert sorted(callback.seen) == sorted({batch // accumulate for batch in batches})
    for step, weights in {**callback.seen, case.steps: snapshot(model)}.items():
        assert_equals(weights, replace(case, steps=step).adamw().weights)


def zero_state(checkpoint: Path) -> dict[str, Any]:
    """Rank 0's ZeRO state in a checkpoint that Lightning's DeepSpeed strategy wrote."""
    (path,) = checkpoint.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)
    assert isinstance(state, dict)
    return state["optimizer_state_dict"]  # type: ignore[no-any-return]


def assert_state_is_exact(state: dict[str, Any], model: TestModule, steps: int) -> None:
    """DeepSpeed's ZeRO state of the only rank against AdamW's after `steps` steps of `CASE`."""
    exact = replace(CASE, steps=steps).adamw()
    kinds = [iter(kind) for kind in (exact.weights, exact.exp_avg, exact.exp_avg_sq)]
    for group, parameters in enumerate(model.parameter_groups()):
        moments = state["base_optimizer_state"]["state"][group]
        assert float(moments["step"]) == steps
        flats = state["single_partition_of_fp32_groups"][group], moments["exp_avg"], moments["exp_avg_sq"]
        for ours, theirs in zip(flats, kinds, strict=True):
            expected = torch.cat([next(theirs).flatten() for _ in parameters])
            assert_equals([ours[: len(expected)]], [expected])


class AsksForState(pl.Callback):
    """Without Lightning's hook: a reader of the state of DeepSpeed's optimizer, after six steps."""

    def __init__(self) -> None:
        self.saved = io.BytesIO()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            torch.save(optimizer_of(trainer).state_dict(), self.saved)


def test_checkpoints_and_readers_see_the_exact_state(tmp_path: Path) -> None:
    model, asks = CASE.make_model(), AsksForState()
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fit(model, enable_checkpointing=True, callbacks=[saves, asks])
    assert {path.name for path in tmp_path.iterdir()} == {"step=5.ckpt", "step=10.ckpt"}
    for steps in (5, 10):
        assert_state_is_exact(zero_state(tmp_path / f"step={steps}.ckpt"), model, steps)
    asks.saved.seek(0)
    assert_state_is_exact(torch.load(asks.saved, weights_only=False), model, 6)
    # Neither disturbs anything.
    assert_equals(snapshot(model), CASE.adamw().weights)


def test_default_checkpoints(tmp_path: Path) -> None:
    """Lightning's own callback, which saves at the end of an epoch."""
    model = replace(CASE, steps=4).make_model()
    trainer = fit(model, 4, enable_checkpointing=True, default_root_dir=tmp_path)
    (path,) = tmp_path.glob("**/*.ckpt")
    assert_state_is_exact(zero_state(path), model, 4)
    assert trainer.global_step == 4
