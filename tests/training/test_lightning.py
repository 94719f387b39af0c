"""What users put into a LightningModule and a Trainer: with nothing late, the same numbers as plain Lightning's and DeepSpeed's offload's;
unusual callbacks, checkpoints and errors.

Tied and unused weights, layers frozen in turn and activation checkpointing under weight prediction: see test_equivalence.
What is refused: see test_refused_at_setup.
"""

import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from callbacks import After, At
from harness import fit, make_trainer, weights_of
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.checkpoints import Checkpoints
from lightning_zenflow.worker.process import WorkerError
from models import TINY, LinearLossModule
from networks import Deep, OddNet, TiedNet
from side_by_side import NOTHING_LATE, Net, compare, train

IN_PIECES = partial(Deep, n_layers=3, width=8)


class Grouped(Net):
    """A parameter group for each parameter, none like another."""

    @override
    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [p],
                "lr": 1e-3 * (i + 1),
                "betas": (0.5 + 0.05 * i, 0.9 + 0.01 * i),
                "eps": 10.0 ** -(4 + i % 4),
            }
            for i, p in enumerate(self.parameters())
        ]
        return torch.optim.AdamW(groups)


@pytest.mark.parametrize(
    ("make", "other"),
    [(IN_PIECES, "plain"), (Grouped, "plain"), (OddNet, "plain"), (TiedNet, "plain"), (TiedNet, "stock")],
)
def test_models(make: Any, other: Any) -> None:
    compare(make, lambda: {"max_steps": 5, "gradient_clip_val": 0.5}, others=(other,), atol=4e-6)


def test_weights_of_odd_layouts_in_checkpoints(tmp_path: Path) -> None:
    """A resumed run ends with the bits of the one that saved, and exports have the parameters' shapes."""
    keys = {"update_interval": 4, "publish_lag": 1, "provisional_scale": 0, "weight_prediction": 0}
    model, resumed = OddNet(), OddNet()
    make = partial(ZenFlowStrategy, **keys, checkpoint_format="deepspeed")
    fit(model, make(), steps=4).save_checkpoint(tmp_path / "a.ckpt")
    fit(resumed, make(), steps=4, resume=tmp_path / "a.ckpt")
    exported = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "a.ckpt", tmp_path / "a.pt")["state_dict"]
    for (name, p), ours in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert p.shape == ours.shape and torch.equal(p, ours), name
        assert torch.equal(exported[name], p), name


class Overflows(Net):
    """A loss so large that the first scale, 65536, and some after it are too large for fp16."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) * 16


def test_fp16() -> None:
    """As many steps are skipped and halve the loss scale as under DeepSpeed's offload; provisional updates stay finite."""
    sixteen = {"max_steps": 14, "precision": "16-true", "gradient_clip_val": 0.5}
    ours, theirs = (train(who, Overflows, lambda: dict(sixteen)) for who in ("zenflow", "stock"))
    assert ours.skipped == theirs.skipped > 0
    assert ours.steps == theirs.steps == 14
    for key, weight in ours.weights.items():
        # fp16 has 11 significant bits.
        torch.testing.assert_close(weight.float(), theirs.weights[key].float(), rtol=2**-9, atol=1e-3)
    # What has been submitted before a gradient overflows would be shown with a step that is skipped.
    without_clipping = {"max_steps": 14, "precision": "16-true"}
    exact, adamw = (
        train("zenflow", Overflows, lambda: dict(without_clipping), {**NOTHING_LATE, **keys})
        for keys in ({}, {"overlap_step": True, "clip_prediction": False})
    )
    assert exact.skipped > 0
    assert exact.metrics == adamw.metrics
    late = {**NOTHING_LATE, "update_interval": 4, "publish_lag": 1}
    run = train("zenflow", Overflows, lambda: {"max_steps": 14, "precision": "16-mixed"}, late)
    assert run.skipped > 0
    assert all(math.isfinite(loss) for metrics in run.metrics for loss in metrics.values())


class Loaded(Net):
    """Counts how often its loader is asked for.

    Args:
        loader: makes the loader.
        **options: as `Net`.
    """

    def __init__(self, loader: Callable[[], Any], **options: Any) -> None:
        super().__init__(**options)
        self.loader, self.asked = loader, 0

    @override
    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.loader()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.tensor(batch_idx), batch_idx)


class Stream(IterableDataset[int]):
    """Of unknown length: that a batch was the last one shows when the next one is asked for."""

    @override
    def __iter__(self) -> Any:
        return iter(range(7))


def epoch_of(n: int = 4) -> DataLoader[int]:
    return DataLoader(range(n))


def scheduled(kind: type, *arguments: Any, every: str = "step", **options: Any) -> Callable[[Any], dict[str, Any]]:
    """Makes what `configure_optimizers` returns as "lr_scheduler"."""
    return lambda optimizer: {"scheduler": kind(optimizer, *arguments, **options), "interval": every, "frequency": 1}


EVERY_EPOCH = scheduled(lr_scheduler.StepLR, 1, 0.5, every="epoch")
RESTARTS = scheduled(lr_scheduler.CosineAnnealingWarmRestarts, 3)
# Changes beta1 as well.
CYCLE = scheduled(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=13)
PLATEAU = scheduled(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.3, threshold=0.2, every="epoch")
PRUNING: dict[str, Any] = {"parameter_names": ["weight"], "amount": 0.3, "use_lottery_ticket_hypothesis": False}
ACCUMULATED = {"max_epochs": 3, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
LOOPS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[], Any], dict[str, Any]]] = {
    "max_steps in mid-epoch, without batches": (
        lambda optimizer: {**scheduled(lr_scheduler.ExponentialLR, 0.8)(optimizer), "frequency": 2},
        lambda: DataLoader(range(4), batch_size=None),
        {"max_steps": 6, "gradient_clip_val": 0.5},
    ),
    "stopped early": (
        lambda optimizer: {**PLATEAU(optimizer), "monitor": "val_loss"},
        epoch_of,
        {"max_epochs": 30, "limit_val_batches": 1, "callbacks": [EarlyStopping("val_loss", 0.05, patience=2)]},
    ),
    "a list of batches, validated in mid-epoch": (
        RESTARTS,
        lambda: DataLoader(range(4), batch_sampler=[[0], [1, 2], [3], [0]]),
        {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1},
    ),
    "no loader at all": (EVERY_EPOCH, lambda: range(4), {"max_epochs": 2, "barebones": True}),
    "no steps": (EVERY_EPOCH, epoch_of, {"max_steps": 0}),
    "a short test run": (CYCLE, epoch_of, {"fast_dev_run": 2}),
    # The module has the pruned weights after `fit`; without `make_pruning_permanent` it keeps the masks.
    **{
        f"pruned, permanently: {permanent}": (
            EVERY_EPOCH,
            epoch_of,
            {
                "max_epochs": 2,
                "callbacks": [ModelPruning("l1_unstructured", make_pruning_permanent=permanent, **PRUNING)],
            },
        )
        for permanent in (True, False)
    },
    # The last micro-batches of an epoch make a step; the loss is divided by `accumulate_grad_batches` whatever is left.
    "ends in mid-accumulation": (CYCLE, lambda: epoch_of(7), ACCUMULATED),
    "a stream ends in mid-accumulation": (CYCLE, lambda: DataLoader(Stream()), ACCUMULATED),
    "ends before an accumulation": (CYCLE, lambda: epoch_of(7), {**ACCUMULATED, "accumulate_grad_batches": 9}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_schedulers_loaders_and_loops(name: str) -> None:
    scheduler, loader, options = LOOPS[name]
    made: list[Loaded] = []

    def make() -> Loaded:
        made.append(Loaded(loader, scheduler=scheduler))
        return made[-1]

    ours = compare(make, lambda: deepcopy(options), others=("plain", "stock") if "accumulation" in name else ("plain",))
    assert {model.asked for model in made} <= {1} or ours.steps == 0
    if name == "stopped early":
        assert 1 < ours.epochs < 30 and len({rates[0] for rates in ours.learning_rates}) > 1


class TwoSchedulers(Net):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        return [optimizer], [EVERY_EPOCH(optimizer), {**PLATEAU(optimizer), "monitor": "val_loss"}]


def test_two_schedulers_of_one_optimizer() -> None:
    options = {"max_epochs": 6, "limit_val_batches": 1}
    ours = compare(TwoSchedulers, lambda: deepcopy(options), others=("plain",))
    assert ours.learning_rates[-1][0] < ours.learning_rates[0][0] * 0.5**5


def averaged(folder: Path) -> dict[str, Any]:
    callbacks = [EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)]
    return {"callbacks": callbacks, "enable_checkpointing": True, "max_steps": 8, "limit_val_batches": 1}


def test_averaged_weights_are_in_checkpoints(tmp_path: Path) -> None:
    """A resumed run ends as the one that saved; evaluation of a checkpoint takes the averaged weights, as from Lightning's own."""
    whole = train("zenflow", Net, lambda: averaged(tmp_path / "zenflow"))
    plain = train("plain", Net, lambda: averaged(tmp_path / "plain"))
    (saved,) = (tmp_path / "zenflow").glob("*step=4.ckpt")
    (theirs,) = (tmp_path / "plain").glob("*step=4.ckpt")
    resumed, evaluated, in_pieces = Net(), Net(), Net()
    make_trainer(ZenFlowStrategy(**NOTHING_LATE), **averaged(tmp_path / "resumed")).fit(resumed, ckpt_path=saved)
    for model, stage in ((evaluated, 2), (in_pieces, 3)):
        trainer = make_trainer(ZenFlowStrategy(stage=stage), limit_val_batches=1)
        trainer.validate(model, ckpt_path=saved, verbose=False)
    torch.testing.assert_close(weights_of(in_pieces), weights_of(evaluated), rtol=0, atol=0)
    torch.testing.assert_close(dict(resumed.named_parameters()), whole.weights, rtol=0, atol=0)
    torch.testing.assert_close(whole.weights, plain.weights, rtol=0, atol=2e-6)
    of_plain = dict(torch.load(theirs, weights_only=False)["state_dict"])
    torch.testing.assert_close(dict(evaluated.named_parameters()), of_plain, rtol=0, atol=2e-6)


def test_averaging_may_begin_with_a_resumed_run(tmp_path: Path) -> None:
    fit(Net(), ZenFlowStrategy(**NOTHING_LATE), steps=1).save_checkpoint(tmp_path / "a.ckpt")
    options = {"callbacks": [EMAWeightAveraging(decay=0.5)], "resume": tmp_path / "a.ckpt"}
    fit(Net(), ZenFlowStrategy(**NOTHING_LATE), steps=2, **options)


def test_a_checkpoint_without_a_training(tmp_path: Path) -> None:
    trainer = make_trainer(ZenFlowStrategy())
    trainer.strategy.connect(Net())
    with pytest.raises(MisconfigurationException, match="must come after `fit`"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


def test_the_users_error_is_raised_if_the_last_checkpoint_fails(tmp_path: Path) -> None:
    """Its folder becomes a file."""
    folder = tmp_path / "checkpoints"

    def fails(trainer: pl.Trainer) -> None:
        if trainer.global_step == 2:
            shutil.rmtree(folder, ignore_errors=True)
            folder.write_text("")
            raise KeyError("the user's own mistake")

    callbacks = [At("on_before_backward", fails), ModelCheckpoint(folder, save_on_exception=True)]
    trainer = make_trainer(ZenFlowStrategy(), max_steps=4, callbacks=callbacks, enable_checkpointing=True)
    with (
        pytest.warns(UserWarning, match="no checkpoint at .* of the training that ends with an error"),
        pytest.raises(KeyError, match="the user's own mistake"),
    ):
        trainer.fit(LinearLossModule(shapes=TINY))
    # Not a rule for saves after it.
    with pytest.raises((OSError, RuntimeError), match="training ended before|could not be saved"):
        trainer.save_checkpoint(folder / "a.ckpt")


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_the_users_error_is_raised_before_there_is_anything_to_save(hook: str, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("the user's own mistake")

    model = LinearLossModule(shapes=TINY)
    setattr(model, hook, fails)
    trainer = make_trainer(ZenFlowStrategy(), callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="no checkpoint at"), pytest.raises(KeyError, match="own mistake"):
            trainer.fit(model)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
@pytest.mark.parametrize(("fails", "save_last"), [(False, True), (True, True), (False, "link")])
def test_the_last_checkpoint_stays_until_another_one_is_complete(
    hook: str, fails: bool, save_last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a save for an exception has to wait, and where it need not."""

    def raises(trainer: pl.Trainer) -> None:
        if trainer.global_step == 3:
            if fails:
                monkeypatch.setattr(Checkpoints, "_save_together", mock.Mock(side_effect=OSError("no space")))
            raise KeyError("the user's own mistake")

    class Raises(LinearLossModule):
        pass

    setattr(Raises, hook, lambda self, *_: raises(self.trainer))
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last=save_last, save_on_exception=True)
    if save_last is True:
        monkeypatch.setattr(callback, "CHECKPOINT_NAME_LAST", "last-{step}")
    with pytest.raises(KeyError, match="the user's own mistake"):
        fit(Raises(shapes=TINY), steps=5, callbacks=[callback], enable_checkpointing=True)
    last, *others = sorted(path.name for path in tmp_path.iterdir())
    assert others == ["step=2.ckpt", "step=3.ckpt"][: 1 if fails else 2]
    assert last == ("last.ckpt" if save_last == "link" else "last-step=2.ckpt" if fails else "last-step=3.ckpt")
    if save_last == "link":
        assert (tmp_path / last).resolve().name == others[-1]


def test_what_a_failed_save_of_several_was_to_replace_stays(tmp_path: Path) -> None:
    """All wait until their batch is over."""
    old, new, kept, failed = (tmp_path / f"{name}.ckpt" for name in ("old", "new", "kept", "failed"))

    def replace(trainer: pl.Trainer) -> None:
        if trainer.global_step == 0:
            return
        (failed / "no checkpoint").mkdir(parents=True)
        for before, path in ((old, new), (kept, failed)):
            trainer.save_checkpoint(path)
            trainer.strategy.remove_checkpoint(before)

    def save(trainer: pl.Trainer) -> None:
        for path in (old, kept):
            trainer.save_checkpoint(path)

    with pytest.raises(IsADirectoryError):
        callbacks = [After([1], save), At("on_after_backward", replace)]
        fit(LinearLossModule(shapes=TINY), steps=3, callbacks=callbacks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed.ckpt", "kept.ckpt", "new.ckpt"]


def test_a_step_after_the_end_of_training() -> None:
    model = Net()
    trainer = fit(model)
    model.loss(0, 0, 0).backward()
    with pytest.raises(WorkerError, match="worker of this training has been ended"):
        trainer.optimizers[0].step()
