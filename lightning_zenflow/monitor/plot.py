"""Drawing of a timeline with matplotlib, an optional dependency."""

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
"""Colour by category of event."""


def can_draw() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(trace: Mapping[str, Any]) -> "Figure":
    """Draws a row for each lane, with time from left to right and waits in red.

    Args:
        trace: as returned by `timeline.chrome_trace`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not can_draw():
        raise ModuleNotFoundError(
            "drawing a timeline needs matplotlib: pip install 'lightning-zenflow[timeline]', or open the file in ui.perfetto.dev"
        )
    # pyplot would keep a reference to the figure and choose a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.9 + 0.42 * len(lanes(trace))), layout="constrained")
    axes = figure.subplots()
    draw_lanes(axes, trace)
    axes.set_xlabel("ms")
    return figure


def lanes(trace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Names of the lanes by (process id, thread id), from top to bottom."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def draw_lanes(axes: "Axes", trace: Mapping[str, Any]) -> None:
    """Draws the lanes and their names into axes, in milliseconds."""
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
    """Writes the drawing (see `draw`) as a PNG file."""
    draw(trace).savefig(path, format="png", dpi=130)
