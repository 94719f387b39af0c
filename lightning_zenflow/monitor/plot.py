"""Draws a timeline with matplotlib, which is not among the package's own dependencies."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "wait": "#d62728",
    "step": "#e0e0e0",
    "forward": "#1f77b4",
    "backward": "#17becf",
    "exact step": "#9467bd",
    "provisional update": "#e377c2",
    "d2h copies": "#ff7f0e",
    "h2d copies": "#bcbd22",
    "worker": "#2ca02c",
}
"""By category of event."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(trace: Mapping[str, Any]) -> "Figure":
    """One row for each lane, time from left to right; waits are red.

    Args:
        trace: see `timeline.chrome_trace`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
    """
    if not can_draw():
        raise ModuleNotFoundError(
            "drawing a timeline needs matplotlib: pip install 'lightning-zenflow[timeline]', or open the file in ui.perfetto.dev"
        )
    # Not pyplot, which keeps figures and chooses a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.9 + 0.42 * len(lanes(trace))), layout="constrained")
    axes = figure.subplots()
    draw_lanes(axes, trace)
    axes.set_xlabel("ms")
    return figure


def lanes(trace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Numbers of process and thread -> name of the lane, from top to bottom."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def draw_lanes(axes: "Axes", trace: Mapping[str, Any]) -> None:
    """Draws the rows and their names; times in milliseconds."""
    names = lanes(trace)
    for row, lane in enumerate(names):
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == lane]
        axes.broken_barh(
            [(e["ts"] / 1e3, e["dur"] / 1e3) for e in spans],
            (row - 0.4, 0.8),
            facecolors=[_COLOURS[e["cat"]] for e in spans],
        )
        for event in spans:
            if event["cat"] == "step":
                axes.axvline(event["ts"] / 1e3, color="#808080", linewidth=0.6)
                middle = (event["ts"] + event["dur"] / 2) / 1e3
                axes.text(middle, row, event["name"], ha="center", va="center", fontsize="small", clip_on=True)
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    axes.margins(x=0.01)


def draw_to(trace: Mapping[str, Any], path: Path) -> None:
    """Writes the drawing as PNG; see `draw`."""
    draw(trace).savefig(path, format="png", dpi=130)
