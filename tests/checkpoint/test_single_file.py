"""`checkpoint_format: lightning`: one file that continues AdamW's training under strategies for one device, and the other way round; what
is in it. That it continues ours bit for bit: test_checkpoint; what is refused: test_refused.
"""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from callbacks import At, save
from checkpoint_files import edit
from fabric_runs import set_up, train_step
from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.checkpoint.single_file import FILE_KEY
from lightning_zenflow.core.saved_tensors import DiskCopies
from models import LinearLossModule
from networks import SmallNet
from same_bits import assert_same_tensors
from side_by_side import LATE, NOTHING_LATE

STEPS, SAVED = 14, 6
limit = partial(ZenFlowStrategy, **NOTHING_LATE)
"""At the settings at which training is AdamW's."""


def test_frozen_pieces_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each type: a process may have few files open."""
    sizes: list[int] = []
    zeros = DiskCopies.zeros
    monkeypatch.setattr(DiskCopies, "zeros", lambda self, numel, *of: (sizes.append(numel), zeros(self, numel, *of))[1])
    model, callbacks = LinearLossModule(), [At("on_train_end", partial(save, path := tmp_path / "a.ckpt"))]
    frozen = dict([*model.named_parameters()][:3])
    expected = [p.requires_grad_(False).clone() for p in frozen.values()]
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    fit(model, ZenFlowStrategy(config=config, checkpoint_format="lightning"), callbacks=callbacks)
    assert [size for size in sizes if size] == [sum(p.numel() for p in expected)]
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_same_tensors([saved[name] for name in frozen], expected)


def test_frozen_weights_may_be_left_out(tmp_path: Path) -> None:
    model = LinearLossModule()
    names, path = [name for name, _ in model.named_parameters()], tmp_path / "a.ckpt"
    model.get_parameter(names[0]).requires_grad_(False)
    fit(model, ZenFlowStrategy(exclude_frozen_parameters=True), steps=1).save_checkpoint(path)
    assert [*torch.load(path, weights_only=True)["state_dict"]] == names[1:]


class Noted(SmallNet):
    """Has an entry of its own in files, of a name that was ours."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["zenflow"] = {"note": 7}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["zenflow"] == {"note": 7}


def train(
    strategy: Any, steps: int, *, save: Path | None = None, resume: Path | None = None, make: type[Noted] = Noted
) -> Noted:
    model = make(length=STEPS)
    trainer = fit(model, strategy, steps=steps, gradient_clip_val=0.5, resume=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model


class Thawed(Noted):
    """One layer is thawed before the save, its bias behind it, and another one is frozen around it: AdamW's counts are 2, 0, 3 and 6."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hidden.requires_grad_(self.global_step >= 4)
        self.head.requires_grad_(not 3 <= self.global_step < 8)
        self.hidden.bias.requires_grad_(self.global_step >= 7)


@pytest.mark.parametrize("make", [Noted, Thawed])
def test_adamw_continues_ours_and_we_continue_adamws(make: type[Noted], tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a name with spaces, and ümlauts", tmp_path / "theirs.ckpt"
    whole = train("auto", STEPS, make=make)
    train("auto", SAVED, save=theirs, make=make)
    train(limit(), SAVED, save=ours, make=make)
    for strategy, path in ((limit(), theirs), ("auto", ours), (limit(), ours)):
        rest = train(strategy, STEPS, resume=path, make=make)
        torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=1e-5, atol=2e-6)
    # In torch's own words.
    mine, plain = (torch.load(path, weights_only=True) for path in (ours, theirs))
    assert mine.keys() == plain.keys() | {FILE_KEY}
    (mine,), (plain,) = mine["optimizer_states"], plain["optimizer_states"]
    assert mine["param_groups"] == plain["param_groups"]
    # torch has no state of a parameter without a step.
    assert make is Thawed or mine["state"].keys() == plain["state"].keys()
    torch.testing.assert_close({i: mine["state"][i] for i in plain["state"]}, plain["state"], rtol=1e-5, atol=1e-6)


class Validated(SmallNet):
    """Its best step is the fourth one."""

    def __init__(self, length: int = 6) -> None:
        super().__init__(length=length)
        self.save_hyperparameters()

    @override
    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", abs(self.trainer.global_step - 4.0))


def test_paths_of_model_checkpoint_are_files(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    options = {"enable_checkpointing": True, "limit_val_batches": 1, "val_check_interval": 2}
    # As users' code does with the path.
    opens = At("on_train_end", lambda _: Validated.load_from_checkpoint(checkpoints.best_model_path))
    model = Validated()
    trainer = fit(model, ZenFlowStrategy(**LATE), steps=6, callbacks=[checkpoints, opens], **options)
    best = checkpoints.best_model_path
    loaded = Validated.load_from_checkpoint(best)
    assert best.endswith("step=4.ckpt") and loaded.hparams == {"length": 6}
    assert all(path.is_file() for path in tmp_path.iterdir()) and len(os.listdir(tmp_path)) == 3
    assert not torch.equal(next(loaded.parameters()), next(model.parameters()))
    for evaluate in (trainer.test, trainer.validate):
        evaluate(ckpt_path="best", verbose=False)
        assert_same_tensors(list(model.state_dict().values()), list(loaded.state_dict().values()))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    end = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert_same_tensors(list(end["state_dict"].values()), list(loaded.state_dict().values()))
    fit(Validated(7), "auto", steps=7, resume=tmp_path / "end.ckpt")
    os.remove(best)


def test_fabric(tmp_path: Path) -> None:
    """Our file, in a store, continues our loop and a plain one's, whose file continues ours."""
    keys = {**NOTHING_LATE, "checkpoint_format": "lightning"}

    def begin(ours: bool) -> tuple[Fabric, Any, Any]:
        model = SmallNet()
        if ours:
            return set_up(model, **keys)[:3]
        fabric = Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, model.configure_optimizers()["optimizer"])
        wrapped.mark_forward_method("loss")
        return fabric, wrapped, optimizer

    ends: dict[tuple[bool, bool], list[Any]] = {}
    for saves in (True, False):
        path = "memory://fabric/ours.ckpt" if saves else str(tmp_path / "theirs.ckpt")
        fabric, model, optimizer = begin(saves)
        for step in range(SAVED):
            train_step(fabric, model, optimizer, step)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": SAVED, "note": torch.ones(2)})
        of_some = {"model": lambda name, _: name.endswith("bias")}
        fabric.save(tmp_path / "some.ckpt", {"model": model, "step": SAVED}, filter=of_some)
        some = torch.load(tmp_path / "some.ckpt", weights_only=True)
        assert some.keys() == {"model", "step"}
        assert some["model"].keys() == {name for name in model.state_dict() if name.endswith("bias")}
        fabric.strategy.teardown()
        for loads in (True, False):
            fabric, model, optimizer = begin(loads)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            rest = fabric.load(path, state)
            assert state["step"] == SAVED and torch.equal(rest["note"], torch.ones(2))
            losses = [train_step(fabric, model, optimizer, step)[0] for step in range(SAVED, STEPS)]
            ends[saves, loads] = [losses, [w.clone() for w in model.state_dict().values()]]
            fabric.strategy.teardown()
        edit("", lambda content: content.update(note=Path))(tmp_path / "some.ckpt")
        with pytest.raises((CheckpointError, pickle.UnpicklingError), match="weights_only"):
            fabric, model, optimizer = begin(saves)
            fabric.load(tmp_path / "some.ckpt", {"model": model})
        fabric.strategy.teardown()
    for end in ends.values():
        torch.testing.assert_close(end, ends[False, False], rtol=1e-5, atol=2e-6)
