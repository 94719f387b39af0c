"""Loss, perplexity and token accuracy of the responses through `torchmetrics`, which also adds up the counts of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics import Accuracy, MeanMetric, MetricCollection
from torchmetrics.text import Perplexity

from alpaca_task.tokenized import IGNORED


class ResponseMetrics(nn.Module):
    """Metrics over the tokens that are learned, gathered over an epoch.

    Their sums are float32; a module that holds this one and is converted to half precision needs that again, by `keep_float32`.
    """

    def __init__(self, vocab_size: int) -> None:
        """Metrics for predictions among `vocab_size` tokens."""
        super().__init__()
        self.loss = MeanMetric()
        self.metrics = MetricCollection(
            {
                "perplexity": Perplexity(),
                "token_accuracy": Accuracy(task="multiclass", num_classes=vocab_size, average="micro"),
            },
            # They have different states, and finding that out costs an update.
            compute_groups=False,
        )

    def keep_float32(self) -> None:
        """Make all sums float32 again."""
        # Accuracy counts in integers, which no conversion touches and this one would.
        for metric in (self.loss, self.metrics["perplexity"]):
            metric.set_dtype(torch.float32)

    def update(self, loss: Tensor, predictions: Tensor, targets: Tensor) -> None:
        """Take in one batch: its mean loss (scalar), logits float32 [N, V] and the tokens int64 [N], `IGNORED` where they do not count."""
        counted = targets != IGNORED
        predictions, targets = predictions[counted], targets[counted]
        self.loss.update(loss, weight=len(targets))
        self.metrics["perplexity"].update(predictions[None], targets[None])
        self.metrics["token_accuracy"].update(predictions, targets)

    def compute(self) -> dict[str, Tensor]:
        """The epoch's values by name: "loss", "perplexity", "token_accuracy"; then start afresh."""
        values = {"loss": self.loss.compute(), **self.metrics.compute()}
        self.loss.reset()
        self.metrics.reset()
        return values
