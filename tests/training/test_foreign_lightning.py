"""What others ask of a Lightning strategy: unusual callbacks, checkpoints and errors."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from callbacks import After, At
from harness import fit, make_trainer, weights_of
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.checkpoints import Checkpoints
from lightning_zenflow.worker.process import WorkerError
from models import TINY, LinearLossModule
from side_by_side import NOTHING_LATE, Net, train


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


class OtherLoss(Net):
    """A loss that no trained parameter takes part in, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.full((3, 4), 0.5))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.other], lr=0.1)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx in (0, 2) else loss + (self.other * (1 + batch_idx)).square().sum()


def test_steps_without_any_gradient() -> None:
    """Count as steps with a gradient of zero."""
    model = OtherLoss()
    fit(model, ZenFlowStrategy(**NOTHING_LATE), steps=4)
    exact = nn.Parameter(torch.full((3, 4), 0.5))
    optimizer = torch.optim.AdamW([exact], lr=0.1)
    for step in range(4):
        exact.grad = torch.zeros_like(exact) if step in (0, 2) else 2 * exact.detach() * (1 + step) ** 2
        optimizer.step()
    torch.testing.assert_close(model.other.detach(), exact.detach(), rtol=1e-6, atol=1e-6)
    fit(OtherLoss(), ZenFlowStrategy(update_interval=4), steps=4)


def test_unused_parameters_that_deepspeeds_configuration_does_not_allow() -> None:
    strategy = ZenFlowStrategy(config={"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}})
    # Its last matrix has no gradient in every other step.
    with pytest.raises(MisconfigurationException, match=r"every trained parameter, got none of weights.6: freeze them"):
        fit(LinearLossModule(), strategy)


def test_the_progress_bars_stall_is_no_metric_of_the_model(tmp_path: Path) -> None:
    model = LinearLossModule(shapes=TINY)
    trainer = fit(model, steps=5, enable_progress_bar=True, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert "stall_%" in trainer.progress_bar_metrics and "stall_%" not in trainer.callback_metrics


def mistaken(folder: Path, *more: pl.Callback) -> pl.Trainer:
    """Of a training that fails in its third step, as does the checkpoint that is saved for it in the folder, which becomes a file."""

    def fails(trainer: pl.Trainer) -> None:
        if trainer.global_step == 2:
            shutil.rmtree(folder, ignore_errors=True)
            folder.write_text("")
            raise KeyError("the user's own mistake")

    callbacks = [At("on_before_backward", fails), *more]
    return make_trainer(ZenFlowStrategy(), max_steps=4, callbacks=callbacks, enable_checkpointing=True)


def test_the_users_error_is_raised_if_the_last_checkpoint_fails(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    trainer = mistaken(folder, ModelCheckpoint(folder, save_on_exception=True))
    with (
        pytest.warns(UserWarning, match="no checkpoint at .* of the training that ends with an error"),
        pytest.raises(KeyError, match="the user's own mistake"),
    ):
        trainer.fit(LinearLossModule(shapes=TINY))
    # Not a rule for saves after it.
    with pytest.raises((OSError, RuntimeError), match="training ended before|could not be saved"):
        trainer.save_checkpoint(folder / "a.ckpt")


def test_a_checkpoint_on_an_exception_and_none_without(tmp_path: Path) -> None:
    options = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(KeyError, match="the user's own mistake"):
        mistaken(tmp_path / "a", *options["callbacks"]).fit(LinearLossModule(shapes=TINY))
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 2
    fit(LinearLossModule(shapes=TINY), **options)
    assert not list(tmp_path.glob("*.ckpt"))


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
