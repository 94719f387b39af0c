"""What the tables say of a method: its runs at its best learning rate, and how they compare with AdamW's."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import mean, median

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.records import Record, newest
from benchmarks.convergence.settings import Setting

BASELINE = "adamw"


@dataclass(kw_only=True)
class Summary:
    """A method in one setting: its runs at its best learning rate."""

    method: str
    setting: Setting
    by_lr: dict[float, list[Record]]
    """The runs of each learning rate without failures."""
    failed: list[Record] = field(default_factory=list)

    @property
    def best_lr(self) -> float | None:
        """The one with the lowest mean validation loss or median of steps, and then loss, of those with the most seeds; None where every
        learning rate has a failed run."""
        most = max(map(len, self.by_lr.values()), default=0)
        candidates = [lr for lr, runs in self.by_lr.items() if len(runs) == most]
        if self.setting.measure == "steps":
            return min(candidates, key=lambda lr: (self.steps_at(lr), self.mean_at(lr)), default=None)
        return min(candidates, key=self.mean_at, default=None)

    @property
    def best(self) -> list[Record]:
        """The runs at the best learning rate, one for each seed."""
        return [] if self.best_lr is None else self.by_lr[self.best_lr]

    def mean_at(self, lr: float) -> float:
        """Mean validation loss over the seeds."""
        return mean(loss_of(record) for record in self.by_lr[lr])

    def steps_at(self, lr: float) -> float:
        """Median over the seeds of the steps until the threshold; infinite where it was not reached."""
        return median(record.steps_to_threshold or math.inf for record in self.by_lr[lr])

    def of_seeds(self, seeds: Set[int]) -> "Summary":
        """The same method's, by these seeds alone."""
        by_lr = {lr: [run for run in runs if run.spec.seed in seeds] for lr, runs in self.by_lr.items()}
        return replace(self, by_lr={lr: runs for lr, runs in by_lr.items() if runs})

    def to(self, baseline: "Summary") -> float | None:
        """Difference to another method in percent, of the mean loss or the median of steps, over the seeds of both.

        Infinite where the median run misses the threshold; None where that of `baseline` does, or there is no seed of both.
        """
        own, other = with_equal_seeds(self, baseline)
        if own.best_lr is None or other.best_lr is None:
            return None
        if self.setting.measure == "loss":
            return 100 * (own.mean_at(own.best_lr) / other.mean_at(other.best_lr) - 1)
        steps = other.steps_at(other.best_lr)
        return None if math.isinf(steps) else 100 * (own.steps_at(own.best_lr) / steps - 1)


def with_equal_seeds(*summaries: Summary) -> list[Summary]:
    """The summaries by the seeds that all of them have at their best learning rates."""
    seeds = set.intersection(*({run.spec.seed for run in summary.best} for summary in summaries))
    return [summary.of_seeds(seeds) for summary in summaries]


def loss_of(record: Record) -> float:
    """The validation loss of a successful run."""
    assert record.val_loss is not None
    return record.val_loss


def summarise(records: Iterable[Record], setting: Setting) -> list[Summary]:
    """A summary for each method, in the order of `METHODS`; of several records of a run the newest counts."""
    by_method: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for spec, record in sorted(newest(records).items()):
        by_method[spec.method][spec.lr].append(record)
    summaries = []
    for method in sorted(by_method, key=list(METHODS).index):
        by_lr = by_method[method]
        failed = [record for runs in by_lr.values() for record in runs if record.error is not None]
        whole = {lr: runs for lr, runs in by_lr.items() if all(record.error is None for record in runs)}
        summaries.append(Summary(method=method, setting=setting, by_lr=whole, failed=failed))
    return summaries


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the preceding ones, at most `window` values."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def baseline_of(summaries: Iterable[Summary]) -> Summary | None:
    """AdamW's summary, if it has a whole learning rate."""
    return next((summary for summary in summaries if summary.method == BASELINE and summary.best), None)
