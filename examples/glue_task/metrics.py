"""GLUE's official metrics through `torchmetrics`, which also adds up the counts of all ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torchmetrics import (
    Accuracy,
    F1Score,
    MatthewsCorrCoef,
    MeanMetric,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    SpearmanCorrCoef,
)

from glue_task.tasks import EvaluationSet, GlueTask, MetricName


def build_metric(name: MetricName, task: GlueTask) -> Metric:
    """The metric `name` over predicted and true labels (class indices int64 [batch]) or scores (float32 [batch]).

    F1 is that of class 1, as GLUE counts it for MRPC and QQP; accuracy is over all examples, not the mean over classes.
    """
    match name:
        case "accuracy":
            return Accuracy(task="multiclass", num_classes=task.num_outputs, average="micro")
        case "f1":
            return F1Score(task="binary")
        case "matthews":
            return MatthewsCorrCoef(task="binary")
        case "pearson":
            return PearsonCorrCoef()
        case "spearman":
            return SpearmanCorrCoef()


class EvaluationMetrics(nn.Module):
    """Loss and metrics of one evaluation set, gathered over an epoch."""

    def __init__(self, task: GlueTask, evaluation_set: EvaluationSet) -> None:
        super().__init__()
        self._set = evaluation_set
        self.loss = MeanMetric()
        self.metrics = MetricCollection({name: build_metric(name, task) for name in task.metrics})

    def update(self, loss: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Take in one batch: its mean loss (scalar), predictions and labels as `build_metric` has them."""
        self.loss.update(loss, weight=len(labels))
        self.metrics.update(predictions, labels)

    def compute(self) -> dict[str, Tensor]:
        """The epoch's values by name: "loss", "accuracy", ..., or "accuracy_matched" for a named set; then start afresh."""
        values = {"loss": self.loss.compute(), **self.metrics.compute()}
        self.loss.reset()
        self.metrics.reset()
        return {self._set.with_suffix(name): value for name, value in values.items()}


class TaskMetrics(nn.Module):
    """The metrics of all evaluation sets of a task (two for MNLI), and GLUE's score of the task."""

    def __init__(self, task: GlueTask) -> None:
        super().__init__()
        self.sets = nn.ModuleList(EvaluationMetrics(task, evaluation_set) for evaluation_set in task.evaluation_sets)

    def update(self, set_index: int, loss: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Take in one batch of the evaluation set number `set_index`; see `EvaluationMetrics.update`."""
        self.sets[set_index].update(loss, predictions, labels)

    def compute(self) -> dict[str, Tensor]:
        """All values by name and their summary "score": the mean of the task's metrics, as in GLUE's leaderboard."""
        values = {name: value for metrics in self.sets for name, value in metrics.compute().items()}
        scores = [value for name, value in values.items() if not name.startswith("loss")]
        return {**values, "score": sum(scores[1:], start=scores[0]) / len(scores)}
