"""What users do with checkpoints in Lightning: `ModelCheckpoint`, ``last``, a save in the middle of a step, export to one file."""

import gc
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import At
from harness import make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import LinearLossModule
from networks import SmallNet


def limit() -> ZenFlowStrategy:
    """Training with nothing late, every forward pass with the true clip factor."""
    return ZenFlowStrategy(topk_ratio=0, update_interval=1, publish_lag=0, overlap_step=False, worker_cores=1)


def defaults() -> ZenFlowStrategy:
    return ZenFlowStrategy(topk_ratio=0.3, update_interval=4, publish_lag=1, worker_cores=1)


def assert_same(ours: pl.LightningModule, theirs: pl.LightningModule) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_save_between_micro_batches_does_what_it_does_without_deepspeed(tmp_path: Path) -> None:
    """What the step has of gradients is not in the checkpoint; the step ends with the batch with which it would have ended."""
    results = []
    for name, strategy in (("ours", limit), ("theirs", lambda: "auto")):
        path = tmp_path / name
        options: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
        whole, batches = SmallNet(length=24, accumulate=4), count()
        # In mid-accumulation.
        save = At("on_train_batch_end", lambda t, path=path, n=batches: next(n) == 10 and t.save_checkpoint(path))
        make_trainer(strategy(), callbacks=[save], **options).fit(whole)
        rest = SmallNet(length=24, accumulate=4)
        make_trainer(strategy(), **options).fit(rest, ckpt_path=path)
        results.append((whole, rest))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def holds_no_file(_: pl.Trainer) -> None:
    """Of a checkpoint, which would take up the disk after it was deleted."""
    gc.collect()
    assert "_states.pt" not in Path("/proc/self/maps").read_text()


def test_checkpoints_of_everything_and_of_weights_only(tmp_path: Path) -> None:
    """Lightning leaves out what it would resume from, and says so; evaluation takes the weights."""
    model, path = LinearLossModule(length=3), tmp_path / "weights.ckpt"
    trainer = make_trainer(defaults(), max_steps=3)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(path, weights_only=True)
    make_trainer(defaults(), max_steps=4, callbacks=[At("on_train_start", holds_no_file)]).fit(
        LinearLossModule(length=4), ckpt_path=tmp_path / "all.ckpt"
    )
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        make_trainer(defaults(), max_steps=5).fit(LinearLossModule(length=5), ckpt_path=path)
    fresh = LinearLossModule(length=3)
    make_trainer(defaults(), limit_test_batches=1).test(fresh, ckpt_path=path, verbose=False)
    assert_same(fresh, model)


@pytest.mark.parametrize(("format_", "stage"), [("deepspeed", 2), ("lightning", 3)])
def test_a_save_after_an_evaluation(format_: Any, stage: int, tmp_path: Path) -> None:
    """It has the optimizer's state, as without one."""

    def make() -> ZenFlowStrategy:
        return ZenFlowStrategy(stage=stage, update_interval=1, publish_lag=0, worker_cores=1, checkpoint_format=format_)

    whole, rest = LinearLossModule(length=5), LinearLossModule(length=5)
    make_trainer(make(), max_steps=5).fit(whole)
    trainer = make_trainer(make(), max_steps=3, limit_test_batches=1, limit_val_batches=1)
    trainer.fit(rest)
    for number in range(2):
        trainer.test(rest, verbose=False)
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
    resumed = LinearLossModule(length=5)
    make_trainer(make(), max_steps=5).fit(resumed, ckpt_path=tmp_path / "1.ckpt")
    assert_same(resumed, whole)
