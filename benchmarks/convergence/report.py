"""Tables and plots of records."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from benchmarks.common.plots import plot_lines
from benchmarks.common.results import markdown
from benchmarks.convergence.methods import METHODS, REMOVED, names_of, title_of
from benchmarks.convergence.records import Record, newest
from benchmarks.convergence.settings import SETTINGS, Setting

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

    def curve(self) -> list[float]:
        """Training loss at the best learning rate, mean over the seeds and the last 50 steps, each `loss_every` steps."""
        curves = [smooth(record.train_loss, 5) for record in self.best]
        return [mean(at_step) for at_step in zip(*curves, strict=True)]


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
    for method in sorted(by_method, key=[*METHODS, *REMOVED].index):
        by_lr = by_method[method]
        failed = [record for runs in by_lr.values() for record in runs if record.error is not None]
        whole = {lr: runs for lr, runs in by_lr.items() if all(record.error is None for record in runs)}
        summaries.append(Summary(method=method, setting=setting, by_lr=whole, failed=failed))
    return summaries


def table(summaries: Sequence[Summary]) -> str:
    """The Markdown table of one setting."""
    baseline = next((s for s in summaries if s.method == BASELINE and s.best), None)
    with_development_set = any(record.dev_accuracy is not None for s in summaries for record in s.best)
    about_delay = any(summary.setting.methods == "delay" for summary in summaries)
    by_name = {summary.method: summary for summary in summaries if summary.best}
    rows = []
    for summary in summaries:
        row = {"method": title_of(summary.method), "name": f"`{summary.method}`"}
        row |= {"best lr": "", "val. loss": "failed", "min..max": "", "to AdamW": "", "seeds": ""}
        if about_delay:
            row |= {"of the gap": recovered(summary, by_name), "AdamW's loss at": steps_to_loss_of(summary, baseline)}
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
        row["mean at each lr"] = _at_each_lr(summary, "{:.4f}", summary.mean_at)
        rows.append(row)
    return markdown(rows)


def recovered(summary: Summary, by_name: Mapping[str, Summary]) -> str:
    """Share of the gap between the plain delay and AdamW that a method recovers: mean of the seeds that all three have, and range."""
    plain = by_name.get(METHODS[summary.method].plain or "") if summary.method in METHODS else None
    baseline = by_name.get(BASELINE)
    if plain is None or baseline is None or not summary.best:
        return ""
    losses = [{record.spec.seed: loss_of(record) for record in s.best} for s in (plain, baseline, summary)]
    seeds = set.intersection(*(set(of_seed) for of_seed in losses))
    late, adamw, own = ([of_seed[seed] for seed in sorted(seeds)] for of_seed in losses)
    if not seeds or mean(late) <= max(adamw):
        return "no gap"
    shares = [100 * (d - o) / (d - a) for d, a, o in zip(late, adamw, own, strict=True) if d > a]
    whole = 100 * (mean(late) - mean(own)) / (mean(late) - mean(adamw))
    return f"{whole:.0f} % ({min(shares):.0f}..{max(shares):.0f})"


def steps_to_loss_of(summary: Summary, baseline: Summary | None) -> str:
    """Steps until a method's training loss is AdamW's last one."""
    if baseline is None or not baseline.best or not summary.best:
        return ""
    goal, every = baseline.curve()[-1], summary.best[0].loss_every
    at = next((every * (i + 1) for i, loss in enumerate(summary.curve()) if loss <= goal), None)
    return "not reached" if at is None else str(at)


def steps_table(summaries: Sequence[Summary]) -> str:
    """The Markdown table of a setting with a threshold."""
    baseline = next((s for s in summaries if s.method == BASELINE and s.best_lr is not None), None)
    rows = []
    for summary in summaries:
        row = {"method": title_of(summary.method), "name": f"`{summary.method}`"}
        row |= {"best lr": "", "steps": "failed", "min..max": "", "to AdamW": "", "reached": ""}
        if summary.best_lr is not None:
            median_steps = summary.steps_at(summary.best_lr)
            reached = [r.steps_to_threshold for r in summary.best if r.steps_to_threshold is not None]
            row["best lr"], row["reached"] = f"{summary.best_lr:g}", f"{len(reached)} of {len(summary.best)}"
            row["steps"] = "not reached" if math.isinf(median_steps) else f"{median_steps:g}"
            row["min..max"] = f"{min(reached)}..{max(reached)}" if reached else ""
            if baseline is not None and baseline.best_lr is not None and not math.isinf(median_steps):
                row["to AdamW"] = f"{100 * (median_steps / baseline.steps_at(baseline.best_lr) - 1):+.0f} %"
        row["median at each lr"] = _at_each_lr(summary, "{:g}", summary.steps_at)
        rows.append(row)
    return markdown(rows)


def _at_each_lr(summary: Summary, form: str, result: Callable[[float], float]) -> str:
    """The result at each learning rate, in a form of `str.format`, then the failed runs."""
    parts = [f"{lr:g}: {form.format(result(lr))}" for lr in sorted(summary.by_lr)]
    parts += [f"{r.spec.lr:g}, seed {r.spec.seed}: {_short(r.error or '')}" for r in summary.failed]
    return "; ".join(parts)


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


def plot(summaries: Sequence[Summary], setting: Setting, path: Path) -> None:
    """Plots the training loss of the setting's main methods at their best learning rates, means over the seeds."""
    shown = names_of("main" if setting.methods == "all" else setting.methods)
    lines = {}
    for summary in summaries:
        if summary.method in shown and summary.best and setting.measure == "loss":
            means, every = summary.curve(), summary.best[0].loss_every
            lines[f"{title_of(summary.method)} (lr {summary.best_lr:g})"] = (
                range(every, every * len(means) + 1, every),
                means,
            )
        elif summary.method in shown and summary.best:
            # One point a seed; a run that never arrives has none.
            steps = sorted(record.steps_to_threshold or math.nan for record in summary.best)
            lines[f"{title_of(summary.method)} (lr {summary.best_lr:g})"] = (range(1, len(steps) + 1), steps)
    if setting.measure == "loss":
        plot_lines(path, lines, xlabel="step", ylabel="training loss, mean of the last 50 steps", title=setting.title)
    else:
        plot_lines(path, lines, xlabel="seed, in order", ylabel="steps until the threshold", title=setting.title)


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
            summaries = summarise(runs, SETTINGS[setting])
            make_table = steps_table if SETTINGS[setting].measure == "steps" else table
            tables[setting] = f"{make_table(summaries)}\n\n{provenance(runs)}"
            (folder / f"convergence_{setting}.md").write_text(f"{tables[setting]}\n")
            plot(summaries, SETTINGS[setting], folder / f"convergence_{setting}.png")
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
