"""One run in a process of its own: `python -m benchmarks.run_one SPEC_JSON RECORD_FILE CACHE_FOLDER`.

Everything is trained in bf16-true: weights and gradients of the model in bfloat16, master weights and moments in 32 bits, which is what
offloading is for. On a CPU with bfloat16 instructions that is also the fastest.
"""

import hashlib
import json
import math
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks import records
from benchmarks.gpt import GptModule, HeaderData, PreTraining, Shape, pretrained
from benchmarks.methods import METHODS
from benchmarks.records import Record, Spec
from benchmarks.settings import SETTINGS

PRECISION = "bf16-true"


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
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def build(spec: Spec, cache: Path) -> tuple[pl.LightningModule, Any]:
    """Module and data of a run."""
    if SETTINGS[spec.setting].task == "glue":
        from benchmarks import glue_sample  # takes seconds to import transformers

        return glue_sample.build(cache, lr=spec.lr, seed=spec.seed)
    shape = Shape()
    module = GptModule(pretrained(cache, shape, PreTraining()), lr=spec.lr, steps=spec.steps)
    return module, HeaderData(shape, steps=spec.steps, seed=spec.seed)


def train(spec: Spec, record: Record, cache: Path) -> None:
    """Trains, validates after the last step and fills in the record."""
    module, data = build(spec, cache)
    record.data = data.sha256
    record.initial_weights = weights_hash(module)
    losses = LossRecorder(record.loss_every)
    torch.manual_seed(spec.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=METHODS[spec.method].make_strategy(),
        precision=PRECISION,
        max_steps=spec.steps,
        gradient_clip_val=1.0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        # Validation only after the last step: every flush before it would make methods that defer updates more exact.
        val_check_interval=spec.steps,
        check_val_every_n_epoch=None,
    )
    start = time.perf_counter()
    trainer.fit(module, datamodule=data)
    record.seconds = round(time.perf_counter() - start, 2)
    record.train_loss = [round(mean, 5) for mean in losses.means]
    metrics = trainer.callback_metrics
    val_loss = float(metrics["held_out_loss"])
    if not math.isfinite(val_loss):
        raise FloatingPointError(f"the validation loss is {val_loss}")
    record.val_loss = val_loss
    if "val/accuracy" in metrics:
        record.dev_accuracy = float(metrics["val/accuracy"])
        record.dev_loss_of_labels = float(metrics["development_loss_of_labels"])
    record.final_weights = weights_hash(module)


def main(spec: Spec, path: Path, cache: Path) -> None:
    """Runs and writes the record, of a failed run as well."""
    torch.set_num_threads(1)
    # Advice about loggers and workers of data loaders; what matters is raised.
    warnings.filterwarnings("ignore", module="lightning")
    record = Record(
        spec=spec, commit=records.commit_of_code(), versions=records.versions(), hardware=records.hardware()
    )
    try:
        records.check_origin()
        train(spec, record, cache)
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    temporary = path.with_suffix(".part")
    temporary.write_text(records.to_json(record))
    temporary.rename(path)


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
