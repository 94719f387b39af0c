"""Evaluation, the user's hooks, checkpoints and readers of the optimizer's state see exact values, also in the middle of a run."""

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

from harness import EVERYTHING, Case, make_trainer, optimizer_of, snapshot
from models import TestModule

CASE = Case(steps=11, topk_ratio=0.05, update_interval=4, publish_lag=1, max_norm=1.0, strategy_options=EVERYTHING)


def assert_equals(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.detach().double(), b, rtol=1e-6, atol=1e-6)


def fit(model: TestModule, **options: Any) -> pl.Trainer:
    trainer = make_trainer(CASE.make_strategy(), max_steps=CASE.steps, gradient_clip_val=CASE.max_norm, **options)
    trainer.fit(model)
    return trainer


class Watch(pl.Callback):
    """Keeps the weights that validation and the end of training see, and then writes others; saves the optimizer's state after six steps,
    without Lightning's hook.
    """

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}
        self.saved = io.BytesIO()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TestModule)
        self.seen[trainer.global_step] = snapshot(pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            self.saved = io.BytesIO()
            torch.save(optimizer_of(trainer).state_dict(), self.saved)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)
        with torch.no_grad():
            for p in pl_module.parameters():
                p.fill_(7)


def zero_state(checkpoint: Path) -> dict[str, Any]:
    """Rank 0's ZeRO state in a checkpoint that Lightning's DeepSpeed strategy wrote."""
    (path,) = checkpoint.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)
    assert isinstance(state, dict)
    return state["optimizer_state_dict"]  # type: ignore[no-any-return]


def assert_state_is_exact(state: dict[str, Any], case: Case) -> None:
    """DeepSpeed's ZeRO state of the only rank against AdamW's at the end of a case."""
    exact = case.adamw()
    kinds = [iter(kind) for kind in (exact.weights, exact.exp_avg, exact.exp_avg_sq)]
    for group, parameters in enumerate(case.make_model().parameter_groups()):
        moments = state["base_optimizer_state"]["state"][group]
        assert float(moments["step"]) == case.steps
        flats = state["single_partition_of_fp32_groups"][group], moments["exp_avg"], moments["exp_avg_sq"]
        for ours, theirs in zip(flats, kinds, strict=True):
            expected = torch.cat([next(theirs).flatten() for _ in parameters])
            assert_equals([ours[: len(expected)]], [expected])


@pytest.mark.parametrize(("accumulate", "interval"), [(1, 3), (3, 2)])
def test_in_mid_run(accumulate: int, interval: int, tmp_path: Path) -> None:
    """Also between the micro-batches of a step; nothing of it disturbs what follows."""
    case = replace(CASE, accumulate=accumulate)
    model, watch = case.make_model(), Watch()
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fit(
        model,
        accumulate_grad_batches=accumulate,
        val_check_interval=interval,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        callbacks=[watch, saves],
    )
    batches = range(0, case.steps * accumulate + 1, interval)
    assert sorted(watch.seen) == sorted({batch // accumulate for batch in batches} | {case.steps})
    for step, weights in watch.seen.items():
        assert_equals(weights, replace(case, steps=step).adamw().weights)
    assert all((p == 7).all() for p in model.parameters())
    watch.saved.seek(0)
    assert_state_is_exact(torch.load(watch.saved, weights_only=False), replace(case, steps=6))
    assert {path.name for path in tmp_path.iterdir()} == {"step=5.ckpt", "step=10.ckpt"}
    for step in (5, 10):
        assert_state_is_exact(zero_state(tmp_path / f"step={step}.ckpt"), replace(case, steps=step))
