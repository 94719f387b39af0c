"""Line plots of results."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_lines(path: Path, lines: Mapping[str, tuple[Iterable[float], Iterable[float]]], **properties: Any) -> None:
    """Draws lines into a PNG file.

    Args:
        path: the file.
        lines: label -> (x, y).
        properties: of matplotlib's axes, such as `title`, `xlabel` and `ylabel`.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for label, (x, y) in lines.items():
        axes.plot(list(x), list(y), label=label, linewidth=1.2)
    axes.set(**properties)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
