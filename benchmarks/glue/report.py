"""The tables of all runs, and the picture of their training losses."""

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from benchmarks.common.results import markdown
from benchmarks.convergence.plots import COLOURS, LINE_STYLES
from benchmarks.convergence.summary import smooth
from benchmarks.glue.methods import METHODS, TASKS
from benchmarks.glue.run import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ByLr = Mapping[float, Sequence[Record]]
"""Successful runs of a method on a task by learning rate."""


def write_report(records: Sequence[Record], folder: Path) -> str:
    """Writes FOLDER/glue.md and, where matplotlib is installed, glue.svg, and returns the text.

    Raises:
        ValueError: runs of a task and seed began with other weights.
    """
    by_task = group_by_task(records)
    parts = [f"{task}\n\n{table(methods)}" for task, methods in by_task.items() if methods]
    text = "\n\n".join([*parts, origin(records)])
    (folder / "glue.md").write_text(f"{text}\n")
    if importlib.util.find_spec("matplotlib") is None:
        (folder / "glue.svg").unlink(missing_ok=True)
        return f"{text}\n\nglue.svg is not drawn, since there is no matplotlib; --report-only draws it elsewhere."
    from matplotlib import rc_context

    from docs.draw_pictures import STYLE

    with rc_context({**STYLE, "svg.fonttype": "none"}):
        draw(by_task).savefig(folder / "glue.svg", metadata={"Date": None})
    return text


def group_by_task(records: Sequence[Record]) -> dict[str, dict[str, ByLr]]:
    return {task: group([r for r in records if r.task == task]) for task in TASKS}


def group(records: Iterable[Record]) -> dict[str, ByLr]:
    """Successful runs of a task by method, in the order of `METHODS`, and learning rate; of one machine or several."""
    beginnings: dict[tuple[str, int], str] = {}
    found: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.error is None:
            found[record.method][record.lr].append(record)
            if beginnings.setdefault(_beginning(record), record.initial_weights) != record.initial_weights:
                raise ValueError(
                    f"{record.name}: all runs of a seed must begin with the same weights; remove the older files"
                )
    return {method: found[method] for method in METHODS if method in found}


def _beginning(record: Record) -> tuple[str, int]:
    return record.hardware, record.seed


def rate(methods: Mapping[str, ByLr]) -> float:
    """The learning rate at which all methods of a task are compared, AdamW's: that of most of its runs, of several the one with the lowest
    training loss in the last 50 steps, if there are as many as one loss is the mean of. Scores choose none."""
    by_lr = methods.get("auto") or next(iter(methods.values()))
    last = {lr: mean(mean(run.train_loss[-5:] or [math.inf]) for run in runs) for lr, runs in by_lr.items()}
    return min(by_lr, key=lambda lr: (-len(by_lr[lr]), last[lr]))


def scores(runs: Iterable[Record]) -> dict[tuple[str, int], float]:
    """By machine and seed, 100 times GLUE's metric."""
    return {_beginning(run): 100 * run.score for run in runs if run.score is not None}


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean, standard error and number, such as "1.3 ± 0.4 (3)"."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{round(mean(values), 1) + 0.0:{sign}.1f}{error} ({len(values)})" if values else ""


def beside_adamw(methods: Mapping[str, ByLr], method: str) -> str:
    """The mean difference to the runs of AdamW that began alike, on the same machine."""
    ours, adamw = (scores(methods.get(name, {}).get(rate(methods), [])) for name in (method, "auto"))
    return spread([ours[key] - adamw[key] for key in ours if key in adamw], "+")


def table(methods: Mapping[str, ByLr]) -> str:
    """The Markdown table of a task; scores are 100 times GLUE's metric."""
    rows = []
    for method, by_lr in methods.items():
        runs = by_lr.get(rate(methods), [])
        found = scores(runs).values()
        row = {"method": METHODS[method].title, "lr": f"{rate(methods):g}"}
        row["mean at each lr (runs)"] = "; ".join(
            f"{lr:g}: {mean(scores(by_lr[lr]).values()):.1f} ({len(by_lr[lr])})" for lr in sorted(by_lr)
        )
        row["min..max"] = f"{min(found):.1f}..{max(found):.1f}" if found else ""
        row["beside AdamW"] = beside_adamw(methods, method) if method != "auto" else ""
        row["clipped"] = f"{mean(run.clipped or 0 for run in runs):.0%}" if method == "auto" else ""
        row["steps by schedule"] = _schedules(runs)
        row["s a run"] = f"{mean(run.seconds for run in runs):.0f}" if runs else ""
        rows.append(row)
    return markdown(rows)


METRICS = {"SST-2": "accuracy", "CoLA": "Matthews correlation", "RTE": "accuracy (chance: 52.7)"}
HEADINGS = {
    "zenflow_adamw": "`zenflow_adamw`",
    "zenflow": "defaults",
    "zenflow_s4": "S = 4, d = 1",
    "zenflow_int8": "`int8`",
    "deepspeed_zenflow": "DeepSpeed's ZenFlow without a defect",
    "deepspeed_zenflow_as_is": "with it, as released",
}


def summary(by_task: Mapping[str, Mapping[str, ByLr]]) -> str:
    """The Markdown table of all tasks: AdamW's score with its range, and what others have beside it."""
    rows = []
    for task, metric in METRICS.items():
        methods = by_task[task]
        found = scores(methods["auto"][rate(methods)]).values()
        adamw = f"{spread([*found])}, {min(found):.1f} to {max(found):.1f}"
        row = {"score in %": f"{task}, {metric}, lr {rate(methods):g}", "AdamW": adamw}
        rows.append(row | {heading: beside_adamw(methods, method) for method, heading in HEADINGS.items()})
    return markdown(rows)


def _schedules(runs: Iterable[Record]) -> str:
    steps: Counter[str] = Counter()
    for run in runs:
        steps.update(run.schedules)
    return "; ".join(f"{schedule}: {n / steps.total():.0%}" for schedule, n in sorted(steps.items()))


def origin(records: Iterable[Record]) -> str:
    """Commits, versions and machines, and the runs that failed."""
    commits = ", ".join(sorted({record.commit for record in records if record.commit}))
    versions = ", ".join(sorted({", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in records}))
    machines = ", ".join(sorted({record.hardware for record in records}))
    failed = [f"{record.name}: {record.error}" for record in records if record.error is not None]
    return "\n\n".join([f"Commit {commits}; {versions}; {machines}.", *failed])


def draw(by_task: Mapping[str, Mapping[str, ByLr]]) -> "Figure":
    """Training losses at AdamW's learning rate, mean over the seeds and the last 50 steps."""
    from matplotlib.figure import Figure

    shown = {task: methods for task, methods in by_task.items() if methods}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    row = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for axes, (task, methods) in zip(row, shown.items(), strict=False):
        _draw_task(axes, methods)
        axes.set_title(task, loc="left", fontsize=10, fontweight="bold")
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_task(axes: "Axes", methods: Mapping[str, ByLr]) -> None:
    styles = {family: cycle(LINE_STYLES) for family in COLOURS}
    of_method = {name: next(styles[method.family]) for name, method in METHODS.items()}
    at_rate = {method: by_lr.get(rate(methods), []) for method, by_lr in methods.items()}
    for method, runs in at_rate.items():
        if not runs:
            continue
        curves = [smooth(run.train_loss, 5) for run in runs]
        losses = [mean(at_step) for at_step in zip(*curves, strict=True)]
        steps = [runs[0].loss_every * (i + 1) for i in range(len(losses))]
        colour = COLOURS[METHODS[method].family]
        axes.plot(steps, losses, label=METHODS[method].title, color=colour, linestyle=of_method[method], linewidth=1.1)
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(alpha=0.3)
