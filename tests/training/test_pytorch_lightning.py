"""The same class on `pytorch_lightning`'s strategy: a module of that package trains with the bits of the other one."""

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException as LightningsException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import metadata
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zenflow
from models import generator, small_net

pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="an optional package")
ours = pytest.importorskip("lightning_zenflow.pytorch_lightning")

pytestmark = [
    # Advice about data loaders and the like.
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
]

KEYS: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1, "worker_cores": 1}
PACKAGES = {lightning.pytorch: lightning_zenflow, pytorch_lightning: ours}


def make_module(pl: ModuleType) -> Any:
    """A small LightningModule of a package, which keeps its losses."""

    class Small(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Tensor) -> Tensor:
            loss = self.net(torch.randn(5, 12, generator=generator(4, int(batch)))).square().mean()
            self.losses.append(loss.detach().clone())
            return loss

        validation_step = predict_step = training_step

        def train_dataloader(self) -> DataLoader[int]:
            return DataLoader(range(12))

        val_dataloader = predict_dataloader = train_dataloader

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Small()


def make_trainer(pl: ModuleType, strategy: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "limit_val_batches": 1}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False, "gradient_clip_val": 0.1}
    return pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**quiet, **options})


def run(pl: ModuleType, folder: Path) -> list[list[Tensor]]:
    """Losses, weights, and predictions of a training, of one that its checkpoint continues, and of another Trainer."""
    shown = []
    for checkpoint, steps in ((None, 8), (folder / "a.ckpt", 12)):
        model, strategy = make_module(pl), PACKAGES[pl].ZenFlowStrategy(**KEYS)
        logged = {"logger": pl.loggers.TensorBoardLogger(folder), "log_every_n_steps": 2}
        trainer = make_trainer(pl, strategy, max_steps=steps, **logged)
        trainer.fit(model, ckpt_path=checkpoint)
        trainer.save_checkpoint(folder / "a.ckpt")
        shown += [model.losses, [p.detach().clone() for p in model.parameters()]]
    # Another one, as of a wrapper, with the class that was trained.
    shown.append(make_trainer(pl, "zenflow").predict(model, ckpt_path=folder / "a.ckpt"))
    assert trainer.global_step == 12 and all(isinstance(callback, pl.Callback) for callback in trainer.callbacks)
    return shown


def test_bits_of_the_other_package(tmp_path: Path) -> None:
    """Trained, validated, saved, resumed; with metrics and charts."""
    runs = []
    for pl in PACKAGES:
        folder = tmp_path / pl.__name__
        folder.mkdir()
        runs.append(run(pl, folder))
        logged = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
        assert metadata.CONFIG_SUMMARY_TAG in logged.Tags()["tensors"]
        assert "zenflow/overlap/step_ms" in logged.Tags()["scalars"]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_what_is_refused_is_refused_with_that_packages_exception() -> None:
    error = pytorch_lightning.utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match="unknown key 'topk_ration'") as refused:
        ours.ZenFlowStrategy(topk_ration=0.1)
    # As errors of other processes arrive.
    again = pickle.loads(pickle.dumps(refused.value))
    assert isinstance(again, error) and isinstance(again, LightningsException) and str(again) == str(refused.value)
    with pytest.raises(error, match="find the learning rate with another strategy"):
        finder = pytorch_lightning.callbacks.LearningRateFinder()
        make_trainer(pytorch_lightning, "zenflow", max_steps=1, callbacks=[finder]).fit(make_module(pytorch_lightning))
    with pytest.raises(
        error, match="strategy must be ZenFlowStrategy, or an optimizer OffloadAdamW, got SingleDeviceStrategy"
    ):
        trainer = make_trainer(pytorch_lightning, "auto", callbacks=[ours.StallMonitor()], max_steps=1)
        trainer.fit(make_module(pytorch_lightning))
