"""One run of the comparison, mostly in bf16-true: weights and gradients in bfloat16, master weights and moments in 32 bits."""

import hashlib
import math
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks.common import provenance
from benchmarks.common.trainer import quiet_trainer
from benchmarks.convergence.corpus import c_headers, python_library
from benchmarks.convergence.gpt import GptModule, PreTraining, Shape, TextData, pretrained, untrained
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.records import Record, Spec
from benchmarks.convergence.settings import SETTINGS
from benchmarks.convergence.threshold_tasks import TASKS, ThresholdData, ThresholdModule


class LossRecorder(pl.Callback):
    """Means of the training loss over `every` steps."""

    def __init__(self, every: int) -> None:
        self.means: list[float] = []
        self._every = every
        self._open: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._open.append(float(outputs["loss"]))
        if len(self._open) == self._every:
            self.means.append(sum(self._open) / self._every)
            self._open.clear()


def weights_hash(module: torch.nn.Module) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all parameters' bits."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


SMALL = Shape(width=64, layers=2)


def build(spec: Spec, cache: Path) -> tuple[pl.LightningModule, Any]:
    """Module and data of a run."""
    task, make_optimizer = SETTINGS[spec.setting].task, METHODS[spec.method].make_optimizer
    if task in TASKS:
        of_task = TASKS[task]()
        module = ThresholdModule(of_task, lr=spec.lr, make_optimizer=make_optimizer, seed=spec.seed)
        return module, ThresholdData(of_task, steps=spec.steps, seed=spec.seed)
    if task == "gpt":
        shape, text = Shape(), c_headers()
        model = pretrained(cache, shape, PreTraining(steps=1500))
    else:
        shape, text = SMALL, python_library()
        model = untrained(shape, spec.seed)
    gpt = GptModule(model, lr=spec.lr, steps=spec.steps, make_optimizer=make_optimizer)
    return gpt, TextData(text, shape, steps=spec.steps, seed=spec.seed)


def train(spec: Spec, record: Record, cache: Path) -> None:
    """Trains, validates after the last step and completes the record."""
    module, data = build(spec, cache)
    record.data = data.sha256
    record.initial_weights = weights_hash(module)
    losses = LossRecorder(record.loss_every)
    torch.manual_seed(spec.seed)
    method = METHODS[spec.method]
    trainer = quiet_trainer(
        strategy=method.make_strategy(),
        precision=SETTINGS[spec.setting].precision,
        max_steps=spec.steps,
        gradient_clip_val=None if method.clips else 1.0,
        callbacks=[losses],
        num_sanity_val_steps=0,
        # Validation only after the last step: an earlier flush would make methods with deferred updates more exact.
        val_check_interval=spec.steps,
        check_val_every_n_epoch=None,
    )
    start = time.perf_counter()
    trainer.fit(module, datamodule=data)
    record.seconds = round(time.perf_counter() - start, 2)
    record.train_loss = [round(mean, 5) for mean in losses.means]
    if isinstance(module, ThresholdModule):
        record.steps_to_threshold = module.steps_to_threshold
        val_loss = module.held_out_loss
    else:
        val_loss = float(trainer.callback_metrics["held_out_loss"])
    if not math.isfinite(val_loss):
        raise FloatingPointError(f"the validation loss is {val_loss}")
    record.val_loss = val_loss
    record.final_weights = weights_hash(module)


def run(spec: Spec, cache: Path) -> Record:
    """Trains in this process; the record of a failed run has `error` set."""
    torch.set_num_threads(1)
    record = Record(spec=spec, **provenance.origin())
    try:
        provenance.check_origin()
        train(spec, record, cache)
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return record
