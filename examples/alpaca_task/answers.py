"""The callback that shows what the model answers at validation."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from typing_extensions import override

from alpaca_task.data import InstructionData
from alpaca_task.generation import answer
from alpaca_task.module import InstructionTuner
from alpaca_task.records import Record

log = logging.getLogger(__name__)

COLUMNS = ("instruction", "input", "wanted", "answer")


class AnswerSamples(pl.Callback):
    """Lets the model answer the first instructions of the validation set.

    The answers go to the log, and as text to TensorBoard and W&B; the share of answers that are exactly the wanted ones is
    `val/exact_match`. All ranks answer alike, since under ZeRO stage 3 each has only a part of the weights; the first one shows it.
    """

    def __init__(self, *, count: int = 64, shown: int = 6, max_new_tokens: int = 64) -> None:
        """Say how many.

        Args:
            count: Instructions that are answered.
            shown: How many of the answers are shown.
            max_new_tokens: Longest answer in tokens.
        """
        super().__init__()
        for key, value in (("count", count), ("shown", shown), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"AnswerSamples: {key}={value} is not allowed; it must be at least 1")
        self.count = count
        self.shown = shown
        self.max_new_tokens = max_new_tokens

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, InstructionTuner)
        data = trainer.datamodule
        assert isinstance(data, InstructionData)
        records = data.val_records[: self.count]
        answers = answer(
            pl_module.model,
            data.encoder,
            [data.template.fill(record) for record in records],
            max_prompt=data.max_length,
            max_new_tokens=self.max_new_tokens,
        )
        right = sum(record.output == text for record, text in zip(records, answers, strict=True))
        pl_module.log("val/exact_match", right / len(records), prog_bar=True, sync_dist=True)
        if trainer.is_global_zero:
            self._show(trainer, records[: self.shown], answers[: self.shown])

    @staticmethod
    def _show(trainer: pl.Trainer, records: Sequence[Record], answers: Sequence[str]) -> None:
        rows = [[r.instruction, r.input, r.output, text] for r, text in zip(records, answers, strict=True)]
        for instruction, given, wanted, text in rows:
            log.info("step %d: %s [%s] -> %r (wanted %r)", trainer.global_step, instruction, given, text, wanted)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("val/answers", _markdown(rows), trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_text("val/answers", columns=list(COLUMNS), data=rows, step=trainer.global_step)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    return "\n".join([line(COLUMNS), line(["---"] * len(COLUMNS)), *map(line, rows)])
