"""Loss, perplexity and token accuracy of the responses through `torchmetrics`, which also adds up the counts of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from alpaca_task.tokenized import IGNORED


class ResponseMetrics(nn.Module):
    """Metrics over the tokens that are learned, gathered over an epoch.

    Their sums are float32; a module that holds this one and is converted to half precision needs that again, by `keep_float32`.
    """

    def __init__(self) -> None:
        super().__init__()
        # Not torchmetrics' accuracy, which asks for the width of the logits: pretrained models may know more tokens than their tokenizers.
        self.metrics = nn.ModuleDict({"loss": MeanMetric(), "perplexity": Perplexity(), "token_accuracy": MeanMetric()})

    def keep_float32(self) -> None:
        """Make all sums float32 again."""
        for metric in self.metrics.values():
            metric.set_dtype(torch.float32)

    def update(self, loss: Tensor, predictions: Tensor, targets: Tensor) -> None:
        """Take in one batch: its mean loss (scalar), logits float32 [N, V] and the tokens int64 [N], `IGNORED` where they do not count."""
        counted = targets != IGNORED
        predictions, targets = predictions[counted], targets[counted]
        self.metrics["loss"].update(loss, weight=len(targets))
        self.metrics["perplexity"].update(predictions[None], targets[None])
        self.metrics["token_accuracy"].update((predictions.argmax(-1) == targets).float())

    def compute(self) -> dict[str, Tensor]:
        """The epoch's values by name: "loss", "perplexity", "token_accuracy"; then start afresh."""
        values = {name: metric.compute() for name, metric in self.metrics.items()}
        for metric in self.metrics.values():
            metric.reset()
        return values
