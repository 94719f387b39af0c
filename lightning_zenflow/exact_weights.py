"""Weights are exact before any hook of the user's looks at them where training pauses or ends."""

from collections.abc import Callable

import lightning.pytorch as pl
from typing_extensions import override


class ExactWeights(pl.Callback):
    """The first of the trainer's callbacks, since Lightning calls the strategy's hooks after everybody else's.

    What callbacks do to the weights at the end of training (`WeightAveraging` puts the mean there) then stays, and what they export there
    is the result of all steps.

    Args:
        flush: makes the weights exact; called on every rank.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()
