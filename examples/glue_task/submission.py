"""Predictions on the test sets as GLUE's submission files: `SST-2.tsv`, `MNLI-m.tsv`, ..., with the columns index and prediction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from glue_task.tasks import GlueTask, find_task

log = logging.getLogger(__name__)


def prediction_text(value: float, task: GlueTask) -> str:
    """A prediction as GLUE spells it: the label's name, or a score within 0 to 5 with three decimals."""
    return f"{min(max(value, 0.0), 5.0):.3f}" if task.is_regression else task.labels[int(value)]


def write_submission(path: Path, predictions: Mapping[int, float], task: GlueTask) -> None:
    """Write one file: a header, then index and prediction in the order of the indices."""
    lines = [f"{index}\t{prediction_text(value, task)}" for index, value in sorted(predictions.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["index\tprediction", *lines]) + "\n", encoding="utf-8", newline="\n")


class SubmissionWriter(BasePredictionWriter):
    """Writes the files at the end of `predict`, on the first rank, with the predictions of all ranks."""

    def __init__(self, *, task: str, output_dir: str = "logs/submission") -> None:
        """Say what to write where.

        Args:
            task: Name of the GLUE task.
            output_dir: Folder for the files; made if missing.
        """
        super().__init__(write_interval="epoch")
        self.task = find_task(task)
        self.output_dir = Path(output_dir)

    @override
    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        sets = self.task.evaluation_sets
        # Lightning nests the batches by data loader only where there are several.
        per_set = predictions if len(sets) > 1 else [predictions]
        for evaluation_set, batches in zip(sets, per_set, strict=True):
            local = {
                index: value
                for indices, values in batches
                for index, value in zip(indices.tolist(), values.tolist(), strict=True)
            }
            merged = _merge_ranks(local, trainer.world_size)
            if trainer.is_global_zero:
                path = self.output_dir / f"{evaluation_set.submission}.tsv"
                write_submission(path, merged, self.task)
                log.info("wrote %d predictions to %s", len(merged), path)


def _merge_ranks(local: dict[int, float], world_size: int) -> dict[int, float]:
    if world_size == 1:
        return local
    gathered: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(gathered, local)
    return {index: value for part in gathered for index, value in part.items()}
