"""Steps of ZeRO-Offload and `ZenFlowStrategy` over the same time axis, as measured: a picture for docs/how_it_works.md.

    python -m benchmarks.step_time.timelines                        # about a minute; writes docs/images/timelines.png
    python -m benchmarks.step_time.timelines --params 151e6 --compute-ms 540 --png timelines.png

Trains the model of the simulated accelerator once with each, in a process of its own, and records both with the same spans. The axis begins
with a step of typical length and has twice the median length of ZeRO-Offload's steps.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.command_line import CommandLine
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import ROOT, commit_of_code, hardware
from benchmarks.peers.recorded import RecordedZeroOffload
from benchmarks.step_time.run import StepSpec, train
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.monitor.timeline import chrome_trace

PICTURE = ROOT / "docs" / "images" / "timelines.png"

_SHOWN_STEPS = 2
"""Steps of ZeRO-Offload."""
_TITLES = {"zero_offload": "DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)", "zenflow": "ZenFlowStrategy, S=4, d=1"}
_LANE_NAMES = {
    "zero_offload": {"exact step": "CPU: norm, clip, AdamW", "waits of the training thread": "device waits"},
    "zenflow": {
        "exact step": "device: selected columns",
        "provisional update": "device: provisional update",
        "waits of the training thread": "device waits",
    },
}
"""On the simulated device the training thread is the device."""

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

Trace = dict[str, Any]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.step_time.timelines", __doc__)
    add = parser.add_argument
    add("--params", type=float, default=59e6, help="weights of the simulated accelerator's model")
    add("--compute-ms", type=float, default=210.0, help="its forward and backward")
    add("--steps", type=int, default=12, help="recorded steps")
    add("--warm-up", type=int, default=6, help="steps before them")
    add("--timeout", type=float, default=300, help="limit of a training in seconds")
    add("--png", type=Path, default=PICTURE, metavar="FILE")
    return parser.parse(arguments)


def record(spec: StepSpec) -> Trace:
    """Trains in this process; returns the timeline of the steps after the warm-up."""
    first, last = spec.warm_up + 1, spec.warm_up + spec.steps
    if spec.method == "zenflow":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timeline.json"
            keys: dict[str, Any] = {"timeline": path, "timeline_steps": [first, last]}
            train(spec, ZenFlowStrategy(topk_ratio=0.05, update_interval=4, publish_lag=1, **keys))
            trace: Trace = json.loads(path.read_text())
            return trace
    strategy = RecordedZeroOffload()
    recording = strategy.tracer.record(skip=first, steps=spec.steps)
    train(spec, strategy)
    return chrome_trace(recording.steps)


def steps_of(trace: Trace) -> list[dict[str, Any]]:
    """The events of whole steps, in order."""
    return [event for event in trace["traceEvents"] if event.get("cat") == "step"]


def median_us(trace: Trace) -> float:
    """Median length of the steps."""
    return median(step["dur"] for step in steps_of(trace))


def typical_step(trace: Trace, *, before_last: int) -> dict[str, Any]:
    """The step whose length is nearest to the median, among those that precede at least so many; the first if there is none."""
    steps, middle = steps_of(trace), median_us(trace)
    return min(steps[: max(1, len(steps) - before_last)], key=lambda step: abs(step["dur"] - middle))


def from_time(trace: Trace, begin_us: float) -> Trace:
    """The trace with this time as zero."""
    events = [{**e, "ts": e["ts"] - begin_us} if e["ph"] == "X" else e for e in trace["traceEvents"]]
    return {**trace, "traceEvents": events}


def with_names(trace: Trace, names: Mapping[str, str]) -> Trace:
    """The trace with lanes renamed."""
    args = {name: {"name": names.get(name, name)} for name in lanes(trace).values()}
    events = [{**e, "args": args[e["args"]["name"]]} if e["name"] == "thread_name" else e for e in trace["traceEvents"]]
    return {**trace, "traceEvents": events}


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


def draw(traces: Mapping[str, Trace], path: Path, *, about: str) -> None:
    """Draws timelines above each other with one time axis.

    Args:
        traces: method -> timeline.
        path: the PNG file.
        about: text below the axis.
    """
    heights = [len(lanes(trace)) for trace in traces.values()]
    figure = Figure(figsize=(13, 1.6 + 0.36 * sum(heights)), layout="constrained")
    width_us = _SHOWN_STEPS * median_us(traces["zero_offload"])
    rows = figure.subplots(len(traces), sharex=True, height_ratios=heights)
    for axes, (method, trace) in zip(rows, traces.items(), strict=True):
        # The worker's jobs of the last two steps are missing.
        begin_us = typical_step(trace, before_last=math.ceil(width_us / median_us(trace)) + 2)["ts"]
        draw_lanes(axes, with_names(from_time(trace, begin_us), _LANE_NAMES[method]))
        axes.set_title(_TITLES[method], loc="left", fontsize="medium", fontweight="bold")
    rows[-1].set_xlim(0, width_us / 1e3)
    rows[-1].set_xlabel(f"ms, red: waiting\n{about}", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parse_arguments(arguments)
    traces: dict[str, Trace] = {}
    for method in _TITLES:
        spec = StepSpec(
            device="simulated",
            method=method,
            params=options.params,
            compute_s=options.compute_ms / 1e3,
            warm_up=options.warm_up,
            steps=options.steps,
        )
        traces[method] = run_process(record, spec, timeout=options.timeout)
        print(f"{method}: {median_us(traces[method]) / 1e3:.0f} ms a step", flush=True)
    about = (
        f"simulated accelerator, {options.params / 1e6:g} M parameters, {options.compute_ms:g} ms forward and backward;"
        f" {hardware()}, commit {commit_of_code()}, {date.today().isoformat()}"
    )
    draw(traces, options.png, about=about)
    print(f"{options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
