"""Draws the pictures of README.md and how_it_works.md: `python -m docs.draw_pictures` writes them to docs/images, or to the given folder.

`speed` has measured times. The others show order and overlap: their durations are chosen to be legible.
"""

import random
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.first_page import FUSED_S, on_gpu
from lightning_zenflow.core.schedule import StaggeredSchedule, UpdateSchedule, gradient_steps, momentum_steps

TRAIN, STEP, COPY, HOST, WAIT, LIGHT = "#4c78a8", "#f58518", "#72b7b2", "#54a24b", "#e45756", "#d9dee5"
PEER = "#8a929c"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    # The same bytes each time.
    "svg.hashsalt": "lightning_zenflow",
}


def bar(axes: Axes, lane: float, begin: float, length: float, color: str, text: str = "", height: float = 0.72) -> None:
    """A box in a lane, with a text in its middle."""
    axes.add_patch(
        Rectangle((begin, lane - height / 2), length, height, facecolor=color, edgecolor="white", linewidth=0.8)
    )
    dark = color == LIGHT
    axes.text(
        begin + length / 2, lane, text, ha="center", va="center", color="black" if dark else "white", fontsize=7.5
    )


def lanes(axes: Axes, names: list[str], length: float) -> None:
    """Names from top to bottom; time without numbers."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, length)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def draw_zero_offload(axes: Axes, length: float) -> None:
    """Two steps: the device is idle during the copy of gradients, AdamW and the copy of weights."""
    lanes(axes, ["GPU", "PCIe", "CPU"], length)
    begin = 0.0
    for step in ("t", "t+1"):
        bar(axes, 0, begin, 1, TRAIN, f"forw. {step}")
        bar(axes, 0, begin + 1, 2, TRAIN, f"backward {step}")
        bar(axes, 0, begin + 3, 4.5, WAIT, "idle")
        bar(axes, 1, begin + 1.3, 2.2, COPY, "gradients, 2")
        bar(axes, 2, begin + 3.5, 3, HOST, f"AdamW of step {step}")
        bar(axes, 1, begin + 6.5, 1, COPY, "weights, 1")
        begin += 7.5
    axes.set_title("ZeRO-Offload", loc="left", fontsize=10, fontweight="bold")


def draw_exact(axes: Axes, length: float) -> None:
    """Three steps: the CPU updates layers in backward; the GPU waits for the last ones, or has their states itself."""
    lanes(axes, ["GPU", "PCIe", "CPU"], length)
    begin = 0.0
    for number, wait in enumerate((1.7, 1.7, 0.35)):
        step = "t" if number == 0 else f"t+{number}"
        bar(axes, 0, begin, 1, TRAIN, f"forw. {step}")
        bar(axes, 0, begin + 1, 2, TRAIN, f"backward {step}")
        if wait > 1:
            bar(axes, 0, begin + 3, wait, WAIT, "waits for the last")
        else:
            bar(axes, 0, begin + 3, 0.5, STEP, "step")
        bar(axes, 0.8, begin + 1.2, 1.8, COPY, "gradients, 1" if wait > 1 else "gradients, ½", 0.36)
        bar(axes, 1.2, begin + 1.9, wait + 1.1, COPY, "weights, 1" if wait > 1 else "weights, ½", 0.36)
        bar(axes, 2, begin + 1.4, wait + 1.4, HOST, f"AdamW of {step}, by layers" if wait > 1 else "AdamW of half")
        begin += 3 + wait
    axes.set_title(
        "Here, exact (S = 1, d = 0): AdamW begins in backward; in the last step drawn, the GPU has half of the states",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )


def draw_late(axes: Axes, length: float) -> None:
    """The same time holds four steps: the CPU works beside them."""
    lanes(axes, ["GPU", "PCIe", "CPU"], length)
    begin, duration = 0.0, 3.65
    for number in range(4):
        step = "t" if number == 0 else f"t+{number}"
        bar(axes, 0, begin, 1, TRAIN, f"forw. {step}")
        bar(axes, 0, begin + 1, 2, TRAIN, f"backward {step}")
        bar(axes, 0, begin + 3, 0.65, STEP, "step")
        bar(axes, 1, begin + 1.3, 1.5, COPY, "gradients, 1")
        bar(axes, 1, begin + 3.2, 0.45, COPY, "¼")
        bar(axes, 2, begin + 3.0 - (duration if number else 3.0), 2.4 if number else 2.0, HOST, "AdamW, 4 steps of ¼")
        begin += duration
    axes.set_title(
        "Here, late (S = 4, d = 1): each step the CPU applies the gradients of four steps to a quarter of the layers",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )


def steps_side_by_side() -> Figure:
    """Two steps of ZeRO-Offload above those of `ZenFlowStrategy` in the same time, exact and late."""
    length = 15.1
    figure, (first, second, third) = plt.subplots(3, 1, figsize=(9.6, 5.4), layout="constrained")
    draw_zero_offload(first, length)
    draw_exact(second, length)
    draw_late(third, length)
    third.set_xlabel(
        "time, not to scale; numbers beside copies are bytes in sizes of the bf16 model", loc="left", fontsize=8
    )
    return figure


_ON_GPU = {
    "none": ("no offload", LIGHT),
    "zenflow": ("this: weights late, S = 4, d = 1", STEP),
    "zenflow_auto": ('this: "zenflow", as late as it chose', STEP),
    "zenflow_exact_cores": ("this: no weight late", TRAIN),
    "deepspeed_zenflow": ("DeepSpeed ZenFlow, S = 4", PEER),
    "zero_offload": ("DeepSpeed ZeRO-Offload", PEER),
}
"""Methods of the record -> name and colour, the fastest first."""


def speed() -> Figure:
    """Measured: mean times of a step on the H200, from their record."""
    runs = on_gpu()
    step_s = {method: mean(runs[method]["step_s"]) for method in _ON_GPU}
    figure, axes = plt.subplots(figsize=(9.6, 2.6), layout="constrained")
    lanes(axes, [name for name, _ in _ON_GPU.values()], 1.3 * max(step_s.values()))
    for lane, (method, (_, color)) in enumerate(_ON_GPU.items()):
        seconds = step_s[method]
        bar(axes, lane, 0, seconds, color, f"{1e3 * seconds:.0f} ms")
        shares = f"{step_s['none'] / seconds:.0%} (of fused: {FUSED_S / seconds:.0%})"
        axes.text(seconds + 0.01, lane, shares, va="center", fontsize=9)
    axes.set_title("A step on an H200, and speed in % of no offload", loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(
        "1.45e9 parameters in bf16, 8 x 1024 tokens, 16 CPU cores; of fused: of a fused AdamW without offload, estimated",
        loc="left",
        fontsize=8,
    )
    return figure


def columns() -> Figure:
    """Ownership of a matrix' columns, and the place of its exact state."""
    figure, axes = plt.subplots(figsize=(9.6, 2.9), layout="constrained")
    axes.set_axis_off()
    axes.set_xlim(0, 32)
    axes.set_ylim(9.2, -1.4)
    n_columns, n_rows, owned = 12, 6, {2, 7, 8}
    for column in range(n_columns):
        for row in range(n_rows):
            color = STEP if column in owned else LIGHT
            axes.add_patch(Rectangle((column * 0.8, row * 0.9), 0.8, 0.9, facecolor=color, edgecolor="white"))
    axes.text(4.8, -0.5, "weights [out, in], on the GPU, in bf16", ha="center")
    axes.text(4.8, 6.3, "a column: the weights that multiply one input", ha="center", fontsize=8)
    axes.text(4.8, 7.1, "columns with the largest gradients: device-owned", ha="center", fontsize=8, color=STEP)
    axes.text(4.8, 7.9, "all others: host-owned", ha="center", fontsize=8, color="#66707c")
    texts = [
        (0.2, STEP, "GPU", "fp32 master and moments of the device-owned columns: AdamW in every step", 14),
        (2.2, COPY, "GPU", "second moments of the provisional update: one float a row, one a column", 14),
        (4.2, HOST, "host", "fp32 master and moments of every weight: S steps of AdamW in one pass, late", 14),
        (6.2, TRAIN, "host", "gradients of the open windows, bf16", 14),
    ]
    for y, color, where, text, x in texts:
        axes.add_patch(Rectangle((x, y), 1.9, 1.4, facecolor=color, edgecolor="white"))
        axes.text(x + 0.95, y + 0.75, where, ha="center", va="center", color="white", fontsize=8)
        axes.text(x + 2.3, y + 0.75, text, va="center", fontsize=8.5)
    return figure


def windows() -> Figure:
    """The steps that close each block's window and publish its job; from the package's own schedule."""
    schedule = StaggeredSchedule(n_blocks=4, update_interval=4, publish_lag=1)
    figure, axes = plt.subplots(figsize=(9.6, 2.9), layout="constrained")
    last = 13
    opened = dict.fromkeys(range(schedule.n_blocks), 1)
    for step in range(1, last + 1):
        for block in schedule.closing_blocks(step):
            begin = opened[block]
            if step >= 4:  # the first windows are shorter; start where the pattern has settled
                bar(axes, block, begin, step + 1 - begin, LIGHT, f"gradients {begin} to {step}", 0.5)
                lag = schedule.publish_lag
                bar(axes, block + 0.36, step + 1, lag, HOST, "replay", 0.22)
                axes.plot([step + lag + 1], [block + 0.36], marker="^", color=STEP, markersize=7)
            opened[block] = step + 1
    axes.set_yticks(range(4), [f"block {block}" for block in range(4)])
    axes.set_ylim(3.7, -0.5)
    axes.set_xlim(1, last + 2)
    axes.set_xticks([step + 0.5 for step in range(1, last + 2)], [str(step) for step in range(1, last + 2)])
    axes.tick_params(left=False, bottom=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("step")
    axes.set_title(
        "S = 4, d = 1: every step closes and submits one window, replays one and publishes one (triangle)",
        loc="left",
        fontsize=10,
    )
    return figure


def one_weight() -> Figure:
    """A host-owned weight between publishes, beside AdamW's on the same gradients; by the package's own rule, with second moment 1."""
    schedule, beta1, last = UpdateSchedule(update_interval=4, publish_lag=1), 0.9, 16
    s, d = schedule.update_interval, schedule.publish_lag
    noise = random.Random(3)
    gradients = [1.0 + 0.9 * noise.uniform(-1, 1) for _ in range(last + 1)]
    weight, momentum = [0.0], [1.0]
    for gradient in gradients[1:]:
        momentum.append(beta1 * momentum[-1] + (1 - beta1) * gradient)
        weight.append(weight[-1] - momentum[-1])

    def publish(end: int, step: int) -> float:
        """The model's weight after `step`: of a window that closed with `end`, with the provisional updates since then."""
        ahead = weight[end] - momentum_steps(schedule, beta1) * momentum[end]
        return ahead - sum(gradient_steps(schedule, beta1, i - end) * gradients[i] for i in range(end + 1, step + 1))

    figure, axes = plt.subplots(figsize=(9.6, 3.2), layout="constrained")
    first = 5
    x: list[int] = []
    y: list[float] = []
    for step in range(first, last + 1):
        end = (step - d) // s * s
        if step - d == end:
            y += [publish(end - s, step - 1), publish(end, step)]
            x += [step, step]
            axes.plot([step], [weight[end]], marker="o", color=HOST, markersize=6, linestyle="none")
            axes.plot([step], [y[-1]], marker="^", color=STEP, markersize=8, linestyle="none")
        else:
            y += [publish(end, step - 1), publish(end, step)]
            x += [step, step]
    axes.plot(range(first, last + 1), weight[first:], color="#8a929c", linestyle="--", label="AdamW without offload")
    axes.plot(x, y, color=TRAIN, linewidth=1.6, label="the model's weight: a provisional update in every step")
    axes.plot([], [], marker="o", color=HOST, linestyle="none", label="exact weight of the step before, in the worker")
    axes.plot(
        [],
        [],
        marker="^",
        color=STEP,
        linestyle="none",
        label="publish: that weight, predicted, and the last provisional update reapplied",
    )
    axes.set_xticks(range(first, last + 1))
    axes.set_yticks([])
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("One host-owned weight on noisy gradients, S = 4, d = 1", loc="left", fontsize=10)
    return figure


PICTURES = {
    "speed": speed,
    "steps_side_by_side": steps_side_by_side,
    "columns": columns,
    "windows": windows,
    "one_weight": one_weight,
}


def main(folder: Path) -> None:
    """Writes every picture to a folder."""
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
