"""One run: the example's model and data with the settings of conf/glue_minilm.yaml, but for task, method, learning rate and seed."""

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from typing_extensions import override

from benchmarks.common import provenance
from benchmarks.common.trainer import quiet_trainer
from benchmarks.convergence.clipping import ClippedSteps
from benchmarks.convergence.run import LossRecorder, weights_hash
from benchmarks.glue.methods import METHODS, TASKS
from glue_task.data import GlueDataModule
from glue_task.module import GlueClassifier


@dataclass(kw_only=True)
class Record:
    """Identity and result of a run."""

    task: str
    method: str
    lr: float
    seed: int
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str = ""
    seconds: float = 0.0
    """Of the training and the validation behind it."""
    initial_weights: str = ""
    """Hash of their bits."""
    loss_every: int = 10
    """Steps of which each entry of `train_loss` is the mean."""
    train_loss: list[float] = field(default_factory=list)
    score: float | None = None
    """GLUE's metric on the development set, after the last step."""
    clipped: float | None = None
    """Share of the steps whose gradient exceeded the norm of 1.0; of `auto` alone."""
    schedules: dict[str, int] = field(default_factory=dict)
    """Steps by S and d; of this package."""
    error: str | None = None

    @property
    def name(self) -> str:
        """Of the run's file."""
        return f"{self.task}_{self.method}_{self.lr:g}_{self.seed}"


class ScheduleCounter(pl.Callback):
    """Counts steps by S and d."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = trainer.strategy.zenflow_optimizer.training.parts.read_counters()  # type: ignore[attr-defined]
        self.steps[f"S={now.update_interval}, d={now.publish_lag}"] += 1


def train(record: Record, data_dir: Path, pretrained: Path) -> None:
    """Trains, validates after the last step and completes the record."""
    settings: Any = OmegaConf.to_object(OmegaConf.load(provenance.ROOT / "conf" / "glue_minilm.yaml"))
    of_data = {"task": record.task, "data_dir": str(data_dir), "pretrained": str(pretrained)}
    pl.seed_everything(record.seed, verbose=False)
    data = GlueDataModule(**{**settings["data"], **of_data})
    sizes = {"vocab_size": data.vocab_size, "pad_token_id": data.pad_token_id, "max_length": data.max_length}
    of_model = {"task": record.task, "pretrained": str(pretrained), "lr": record.lr, **sizes}
    module = GlueClassifier(**{**settings["model"], **of_model})
    record.initial_weights = weights_hash(module)

    losses, clipping, schedules = LossRecorder(record.loss_every), ClippedSteps(), ScheduleCounter()
    callbacks: list[pl.Callback] = [losses]
    if record.method == "auto":
        callbacks.append(clipping)
    if record.method.startswith("zenflow"):
        callbacks.append(schedules)
    training = TASKS[record.task]
    trainer = quiet_trainer(
        accelerator="auto",
        strategy=METHODS[record.method].make_strategy(),
        max_epochs=training.epochs,
        limit_train_batches=training.batches,
        gradient_clip_val=settings["trainer"]["gradient_clip_val"],
        callbacks=callbacks,
        num_sanity_val_steps=0,
        # Validation only after the last step: an earlier flush would make methods with deferred updates more exact.
        check_val_every_n_epoch=training.epochs,
    )
    pl.seed_everything(record.seed, verbose=False)
    begin = time.perf_counter()
    trainer.fit(module, datamodule=data)
    record.seconds = round(time.perf_counter() - begin, 1)
    record.train_loss = [round(mean, 5) for mean in losses.means]
    record.score = float(trainer.callback_metrics["val/score"])
    record.clipped = clipping.share if record.method == "auto" else None
    record.schedules = dict(schedules.steps)


def run(record: Record, data_dir: Path, pretrained: Path, threads: int) -> Record:
    """Trains in this process; the record of a failed run has `error` set."""
    torch.set_num_threads(threads)
    try:
        provenance.check_origin()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, value in provenance.origin(device, provenance.GLUE_CODE).items():
            setattr(record, name, value)
        train(record, data_dir, pretrained)
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return record
