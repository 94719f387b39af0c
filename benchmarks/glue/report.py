"""The tables of all runs, and the picture of their training losses."""

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
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
    by_task = {task: group([r for r in records if r.task == task]) for task in TASKS}
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


def group(records: Iterable[Record]) -> dict[str, ByLr]:
    """Successful runs of a task by method, in the order of `METHODS`, and learning rate."""
    beginnings: dict[int, str] = {}
    found: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.error is None:
            found[record.method][record.lr].append(record)
            if beginnings.setdefault(record.seed, record.initial_weights) != record.initial_weights:
                raise ValueError(
                    f"{record.name}: all runs of a seed must begin with the same weights; remove the older files"
                )
    return {method: found[method] for method in METHODS if method in found}


def best(by_lr: ByLr) -> Sequence[Record]:
    """The runs at the learning rate with the highest mean score, of those with the most seeds."""
    most = max(map(len, by_lr.values()))
    return max((runs for runs in by_lr.values() if len(runs) == most), key=mean_score)


def mean_score(runs: Iterable[Record]) -> float:
    """Over the seeds."""
    return mean(run.score for run in runs if run.score is not None)


def table(methods: Mapping[str, ByLr]) -> str:
    """The Markdown table of a task; scores are 100 times GLUE's metric."""
    rows = []
    for method, by_lr in methods.items():
        runs = best(by_lr)
        scores = [100 * run.score for run in runs if run.score is not None]
        row = {"method": METHODS[method].title, "best lr": f"{runs[0].lr:g}", "score": f"{mean(scores):.1f}"}
        row |= {"min..max": f"{min(scores):.1f}..{max(scores):.1f}", "seeds": str(len(runs))}
        row["mean at each lr"] = "; ".join(f"{lr:g}: {100 * mean_score(by_lr[lr]):.1f}" for lr in sorted(by_lr))
        row["clipped"] = f"{mean(run.clipped or 0 for run in runs):.0%}" if method == "auto" else ""
        row["steps by schedule"] = _schedules(runs)
        row["s a run"] = f"{mean(run.seconds for run in runs):.0f}"
        rows.append(row)
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
    """Training losses at each method's best learning rate, mean over the seeds and the last 50 steps."""
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
    for method, by_lr in methods.items():
        runs = best(by_lr)
        curves = [smooth(run.train_loss, 5) for run in runs]
        losses = [mean(at_step) for at_step in zip(*curves, strict=True)]
        steps = [runs[0].loss_every * (i + 1) for i in range(len(losses))]
        colour = COLOURS[METHODS[method].family]
        axes.plot(steps, losses, label=METHODS[method].title, color=colour, linestyle=of_method[method], linewidth=1.1)
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(alpha=0.3)
