"""Evaluation, checkpoints and readers of the optimizer's state see exact values, also in the middle of a run."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from harness import Case, fit, make_trainer, snapshot
from lightning_zenflow import ZenFlowStrategy
from models import LinearLossModule, TestModule

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def assert_equals(ours: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


CASE = Case(steps=11, topk_ratio=0.05, update_interval=4, publish_lag=1, max_norm=1.0)


def case_trainer(steps: int, **options: Any) -> pl.Trainer:
    return make_trainer(CASE.make_strategy(), max_steps=steps, gradient_clip_val=CASE.max_norm, **options)


def test_evaluation_after_fit_sees_exact_weights() -> None:
    model = CASE.make_model()
    trainer = case_trainer(CASE.steps, limit_val_batches=1)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    assert_equals(snapshot(model), CASE.adamw().weights)


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
    case = dataclasses.replace(CASE, accumulate=accumulate)
    model = case.make_model()
    callback = WeightsAtValidation()
    trainer = case_trainer(
        case.steps,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        val_check_interval=interval,
        num_sanity_val_steps=1,
        callbacks=[callback],
    )
    trainer.fit(model)
    batches = range(0, case.steps * accumulate + 1, interval)
    assert sorted(callback.seen) == sorted({batch // accumulate for batch in batches})
    for step, weights in callback.seen.items():
        assert_equals(weights, dataclasses.replace(case, steps=step).adamw().weights)
    assert_equals(snapshot(model), case.adamw().weights)


def zero_state(checkpoint: Path) -> dict[str, Any]:
    """Rank 0's ZeRO state in a checkpoint that Lightning's DeepSpeed strategy wrote."""
    (path,) = checkpoint.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)
    assert isinstance(state, dict)
    return state["optimizer_state_dict"]  # type: ignore[no-any-return]


def assert_state_is_exact(state: dict[str, Any], model: TestModule, steps: int) -> None:
    """DeepSpeed's ZeRO state of the only rank against AdamW's after `steps` steps of `CASE`."""
    exact = dataclasses.replace(CASE, steps=steps).adamw()
    position = 0
    for group, parameters in enumerate(model.parameter_groups()):
        moments = state["base_optimizer_state"]["state"][group]
        assert float(moments["step"]) == steps
        begin = 0
        for p in parameters:
            for ours, theirs in (
                (state["single_partition_of_fp32_groups"][group], exact.weights),
                (moments["exp_avg"], exact.exp_avg),
                (moments["exp_avg_sq"], exact.exp_avg_sq),
            ):
                values = ours[begin : begin + p.numel()].detach().double().view(p.shape)
                torch.testing.assert_close(values, theirs[position], rtol=1e-6, atol=1e-6)
            begin += p.numel()
            position += 1


def test_checkpoints_hold_the_exact_state(tmp_path: Path) -> None:
    model = CASE.make_model()
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1)
    case_trainer(CASE.steps, enable_checkpointing=True, callbacks=[callback]).fit(model)
    paths = sorted(tmp_path.iterdir(), key=lambda p: int(p.stem.partition("step=")[2]))
    assert [p.stem.partition("step=")[2] for p in paths] == ["5", "10"]
    for steps, path in zip((5, 10), paths, strict=True):
        assert_state_is_exact(zero_state(path), model, steps)
    # Saving disturbs nothing.
    assert_equals(snapshot(model), CASE.adamw().weights)


def test_the_optimizers_own_state_is_exact() -> None:
    """Without Lightning's hook: readers of the state of DeepSpeed's optimizer."""
    saved = io.BytesIO()

    class Asks(pl.Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, ZenFlowStrategy)
            assert trainer.strategy.zenflow_optimizer is not None
            if trainer.global_step == 6:
                torch.save(trainer.strategy.zenflow_optimizer.state_dict(), saved)

    model = CASE.make_model()
    case_trainer(CASE.steps, callbacks=[Asks()]).fit(model)
    saved.seek(0)
    assert_state_is_exact(torch.load(saved, weights_only=False), model, 6)
    assert_equals(snapshot(model), CASE.adamw().weights)


def test_evaluation_from_a_checkpoint(tmp_path: Path) -> None:
    model = CASE.make_model()
    trainer = case_trainer(6, limit_val_batches=1)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    for evaluating in (trainer, case_trainer(6, limit_val_batches=1)):
        other = CASE.make_model()
        evaluating.test(other, ckpt_path=str(tmp_path / "some.ckpt"), verbose=False)
        for ours, theirs in zip(snapshot(other), snapshot(model), strict=True):
            assert torch.equal(ours, theirs)


def test_default_checkpoints(tmp_path: Path) -> None:
    """Lightning's own callback, which saves at the end of an epoch."""
    trainer = fit(LinearLossModule(length=4), enable_checkpointing=True, default_root_dir=tmp_path, steps=4)
    (path,) = tmp_path.glob("**/*.ckpt")
    assert zero_state(path)
    assert trainer.global_step == 4
