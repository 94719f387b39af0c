"""Tables and plots of records."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmarks.common.plots import plot_lines
from benchmarks.common.results import markdown
from benchmarks.convergence.methods import METHODS, REMOVED, title_of
from benchmarks.convergence.records import Record, newest
from benchmarks.convergence.settings import SETTINGS

BASELINE = "adamw"


@dataclass(kw_only=True)
class Summary:
    """A method in one setting: its runs at the learning rate with the lowest mean validation loss."""

    method: str
    by_lr: dict[float, list[Record]]
    """The runs of each learning rate without failures."""
    failed: list[Record] = field(default_factory=list)

    @property
    def best_lr(self) -> float | None:
        """None where every learning rate has a failed run."""
        return min(self.by_lr, key=self.mean_at, default=None)

    @property
    def best(self) -> list[Record]:
        """The runs at the best learning rate, one for each seed."""
        return [] if self.best_lr is None else self.by_lr[self.best_lr]

    def mean_at(self, lr: float) -> float:
        """Mean validation loss over the seeds."""
        return mean(loss_of(record) for record in self.by_lr[lr])


def loss_of(record: Record) -> float:
    """The validation loss of a successful run."""
    assert record.val_loss is not None
    return record.val_loss


def summarise(records: Iterable[Record]) -> list[Summary]:
    """A summary for each method, in the order of `METHODS`; of several records of a run the newest counts."""
    by_method: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for spec, record in sorted(newest(records).items()):
        by_method[spec.method][spec.lr].append(record)
    summaries = []
    for method in sorted(by_method, key=[*METHODS, *REMOVED].index):
        by_lr = by_method[method]
        failed = [record for runs in by_lr.values() for record in runs if record.error is not None]
        whole = {lr: runs for lr, runs in by_lr.items() if all(record.error is None for record in runs)}
        summaries.append(Summary(method=method, by_lr=whole, failed=failed))
    return summaries


def table(summaries: Sequence[Summary]) -> str:
    """The Markdown table of one setting."""
    baseline = next((s for s in summaries if s.method == BASELINE and s.best), None)
    with_development_set = any(record.dev_accuracy is not None for s in summaries for record in s.best)
    rows = []
    for summary in summaries:
        row = {"method": title_of(summary.method), "name": f"`{summary.method}`"}
        row |= {"best lr": "", "val. loss": "failed", "min..max": "", "to AdamW": "", "seeds": ""}
        if with_development_set:
            row |= {"dev. accuracy": "", "dev. loss": ""}
        if summary.best_lr is not None:
            losses = [loss_of(record) for record in summary.best]
            row["best lr"] = f"{summary.best_lr:g}"
            row["val. loss"] = f"{mean(losses):.4f}"
            row["min..max"] = f"{min(losses):.4f}..{max(losses):.4f}"
            row["seeds"] = str(len(losses))
            if baseline is not None and baseline.best_lr is not None:
                row["to AdamW"] = f"{100 * (mean(losses) / baseline.mean_at(baseline.best_lr) - 1):+.1f} %"
            accuracies = [record.dev_accuracy for record in summary.best if record.dev_accuracy is not None]
            if accuracies:
                row["dev. accuracy"] = f"{100 * mean(accuracies):.1f} %"
            of_labels = [record.dev_loss_of_labels for record in summary.best if record.dev_loss_of_labels is not None]
            if of_labels:
                row["dev. loss"] = f"{mean(of_labels):.3f} ({min(of_labels):.3f}..{max(of_labels):.3f})"
        parts = [f"{lr:g}: {summary.mean_at(lr):.4f}" for lr in sorted(summary.by_lr)]
        parts += [f"{r.spec.lr:g}, seed {r.spec.seed}: {_short(r.error or '')}" for r in summary.failed]
        row["mean at each lr"] = "; ".join(parts)
        rows.append(row)
    return markdown(rows)


def _short(error: str) -> str:
    """The beginning of an error message, formatted for a table cell."""
    line = re.sub(r"\s+", " ", error).replace("|", "/")
    return line if len(line) <= 120 else line[:117] + "..."


def provenance(records: Sequence[Record]) -> str:
    """Commits, versions, machines and data of the records."""

    def distinct(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value}))

    versions = distinct(", ".join(f"{k} {v}" for k, v in record.versions.items()) for record in records)
    return (
        f"Commit {distinct(r.commit for r in records)}; {versions}; {distinct(r.hardware for r in records)};"
        f" {distinct(f'{r.spec.steps} steps' for r in records)}; data {distinct(r.data for r in records)}."
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the preceding ones, at most `window` values."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Plots the training loss of the main methods at their best learning rates, means over the seeds."""
    lines = {}
    for summary in summaries:
        if summary.method in METHODS and METHODS[summary.method].main and summary.best:
            curves = [smooth(record.train_loss, 5) for record in summary.best]
            means = [mean(at_step) for at_step in zip(*curves, strict=True)]
            every = summary.best[0].loss_every
            steps = range(every, every * len(means) + 1, every)
            lines[f"{title_of(summary.method)} (lr {summary.best_lr:g})"] = (steps, means)
    plot_lines(path, lines, xlabel="step", ylabel="training loss, mean of the last 50 steps", title=title)


def write_reports(records: Iterable[Record], folder: Path) -> dict[str, str]:
    """Writes table and plot of each setting; returns the tables by setting."""
    by_setting: dict[str, list[Record]] = defaultdict(list)
    for spec, record in newest(records).items():
        # Shortened trials are another comparison.
        if spec.steps == SETTINGS[spec.setting].steps:
            by_setting[spec.setting].append(record)
    tables = {}
    for setting in SETTINGS:
        if setting in by_setting:
            runs = by_setting[setting]
            _check_beginnings(setting, runs)
            summaries = summarise(runs)
            tables[setting] = f"{table(summaries)}\n\n{provenance(runs)}"
            (folder / f"convergence_{setting}.md").write_text(f"{tables[setting]}\n")
            plot(summaries, SETTINGS[setting].title, folder / f"convergence_{setting}.png")
    return tables


def _check_beginnings(setting: str, runs: Iterable[Record]) -> None:
    beginnings: dict[int, set[str]] = defaultdict(set)
    for record in runs:
        if record.error is None:
            beginnings[record.spec.seed].add(record.initial_weights)
    for seed, weights in beginnings.items():
        if len(weights) > 1:
            raise ValueError(
                f"{setting}, seed {seed}: runs must begin from the same weights, got {', '.join(sorted(weights))}; run all methods again"
                " with --again, or remove the older records"
            )
