"""Tables of records."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.common.results import markdown
from benchmarks.convergence.methods import METHODS, OVERVIEWS
from benchmarks.convergence.records import Record, newest
from benchmarks.convergence.settings import SETTINGS, Setting
from benchmarks.convergence.summary import Summary, baseline_of, loss_of, summarise


def table(summaries: Sequence[Summary], setting: Setting) -> str:
    """The Markdown table of one setting, of losses or of steps until the threshold."""
    counts_steps = setting.measure == "steps"
    value, number, average = ("steps", "reached", "median") if counts_steps else ("val. loss", "seeds", "mean")
    form = "{:g}" if counts_steps else "{:.4f}"
    baseline = baseline_of(summaries)
    rows = []
    for summary in summaries:
        row = {"method": METHODS[summary.method].title, "name": f"`{summary.method}`"}
        row |= {"best lr": "", value: "failed", "min..max": "", "to AdamW": "", number: ""}
        at_lr = summary.steps_at if counts_steps else summary.mean_at
        if summary.best_lr is not None:
            every_run = [r.steps_to_threshold if counts_steps else loss_of(r) for r in summary.best]
            found = [result for result in every_run if result is not None]
            best = at_lr(summary.best_lr)
            row["best lr"] = f"{summary.best_lr:g}"
            row[value] = "not reached" if math.isinf(best) else form.format(best)
            row["min..max"] = f"{form}..{form}".format(min(found), max(found)) if found else ""
            row["to AdamW"] = _to(summary, baseline)
            row[number] = f"{len(found)} of {len(every_run)}" if counts_steps else str(len(found))
        row[f"{average} at each lr"] = _at_each_lr(summary, form, at_lr)
        rows.append(row)
    return markdown(rows)


def overview(by_setting: Mapping[str, Sequence[Summary]], methods: Sequence[str]) -> str:
    """The Markdown table of the settings that have all these methods, as differences to the first one; empty without such a setting."""
    of_settings = {
        name: {summary.method: summary for summary in summaries}
        for name, summaries in by_setting.items()
        if {*methods} <= {*SETTINGS[name].methods} and {summary.method for summary in summaries} & {*methods[1:]}
    }
    rows = []
    for method in methods if of_settings else ():
        row = {"method": METHODS[method].title}
        for name, of_method in of_settings.items():
            row[name] = _to(of_method[method], of_method.get(methods[0])) if method in of_method else ""
        rows.append(row)
    return markdown(rows) if rows else ""


def _to(summary: Summary, baseline: Summary | None) -> str:
    """The difference to AdamW as text."""
    difference = None if baseline is None else summary.to(baseline)
    if difference is None:
        return ""
    if math.isinf(difference):
        return "not reached"
    return f"{difference:+.1f} %" if summary.setting.measure == "loss" else f"{difference:+.0f} %"


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


def tables_of(records: Iterable[Record]) -> dict[str, str]:
    """The table of each setting and the overviews of several, by name."""
    by_setting: dict[str, list[Record]] = defaultdict(list)
    for spec, record in newest(records).items():
        # Shortened trials are another comparison.
        if spec.steps == SETTINGS[spec.setting].steps:
            by_setting[spec.setting].append(record)
    tables, by_name = {}, {}
    for setting in SETTINGS:
        if setting in by_setting:
            runs = by_setting[setting]
            _check_beginnings(setting, runs)
            summaries = by_name[setting] = summarise(runs, SETTINGS[setting])
            tables[setting] = f"{table(summaries, SETTINGS[setting])}\n\n{provenance(runs)}"
    overviews = {name: overview(by_name, methods) for name, methods in OVERVIEWS.items()}
    return tables | {name: text for name, text in overviews.items() if text}


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
