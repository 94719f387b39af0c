"""Plots of a setting whose losses are compared: training loss, and each method's runs beside AdamW's."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.convergence.methods import METHODS, Family
from benchmarks.convergence.settings import Setting
from benchmarks.convergence.summary import BASELINE, Summary, baseline_of, loss_of

COLOURS: Mapping[Family, str] = {
    "AdamW": "black",
    "ZenFlowStrategy": "tab:blue",
    "ZenFlowStrategy, switched off in part": "tab:red",
    "others": "tab:orange",
}
LINE_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 4)))


def plot(summaries: Sequence[Summary], setting: Setting, path: Path) -> None:
    """Draws the runs at each method's best learning rate into a PNG file."""
    shown = [summary for summary in summaries if summary.best]
    if not shown:
        return
    height = 1.3 + 0.26 * len(shown)
    figure = Figure(figsize=(13, 4 + height), layout="constrained")
    top, bottom = figure.subfigures(2, squeeze=False, height_ratios=(4, height))[:, 0]
    _draw_curves(top.subplots(), shown)
    _draw_losses(bottom.subplots(), shown)
    figure.suptitle(setting.title)
    figure.savefig(path, dpi=100)


def _draw_curves(axes: Axes, shown: Sequence[Summary]) -> None:
    """Training losses. The first tenth of the steps is cut off above: it would take most of the height."""
    styles = {family: cycle(LINE_STYLES) for family in COLOURS}
    highest = -math.inf
    for summary in shown:
        curve, every = summary.curve(), summary.best[0].loss_every
        family = METHODS[summary.method].family
        axes.plot(
            range(every, every * len(curve) + 1, every),
            curve,
            label=METHODS[summary.method].title,
            color=COLOURS[family],
            linestyle=next(styles[family]),
            linewidth=1.2,
        )
        highest = max(highest, curve[len(curve) // 10])
        if summary.method == BASELINE:
            axes.axhline(curve[-1], color="black", linewidth=0.5)
    if math.isfinite(highest):
        axes.set_ylim(top=highest)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.set(xlabel="step", ylabel="training loss, mean of the last 50 steps")
    axes.grid(alpha=0.3)


def _draw_losses(axes: Axes, shown: Sequence[Summary]) -> None:
    """A row for each method: a dot for each seed, a bar for the mean."""
    baseline = baseline_of(shown) or shown[0]
    reference = mean(map(loss_of, baseline.best))
    values = [[100 * (loss_of(record) / reference - 1) for record in summary.best] for summary in shown]
    # Linear within 1 %, where rows near AdamW's lie; logarithmic beyond.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([-10, -1, 0, 1, 10], ["-10", "-1", "0", "+1", "+10"])
    axes.minorticks_off()
    for row, (summary, of_row) in enumerate(zip(shown, values, strict=True)):
        colour = COLOURS[METHODS[summary.method].family]
        axes.plot(of_row, [row] * len(of_row), color=colour, marker="o", markersize=4, alpha=0.5, linestyle="none")
        axes.plot([mean(of_row)], [row], color=colour, marker="|", markersize=11, markeredgewidth=2)
    axes.grid(axis="x", alpha=0.3)
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, -1.1), max(right, 1.1))
    axes.axvline(0, color="black", linewidth=0.5)
    names = [f"{METHODS[s.method].title} (lr {s.best_lr:g}, {len(s.best)} seeds)" for s in shown]
    axes.set_yticks(range(len(shown)), names, fontsize="small")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel=f"val. loss to {'AdamW' if baseline.method == BASELINE else METHODS[baseline.method].title}, %")
