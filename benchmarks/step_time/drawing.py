"""Drawing of a timeline with matplotlib."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

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


def lanes(trace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Names of the lanes by (process id, thread id), from top to bottom, of a trace as returned by `timeline.chrome_trace`."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def draw_lanes(axes: Axes, trace: Mapping[str, Any]) -> None:
    """Draws a row for each lane, with its name, in milliseconds from left to right, and waits in red."""
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
