"""One step of ZeRO-Offload's beside ours, as they were measured: the picture of the README.

    python -m benchmarks.timelines                                  # about a minute; writes docs/images/timelines.png
    python -m benchmarks.timelines --params 151e6 --compute-ms 540 --png timelines.png

Trains the model of the simulated accelerator once under each, each in a process of its own, records both with the same kind of spans, and
draws them over the same time, twice the median of ZeRO-Offload's steps, from a step of typical length on.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.processes import run_process
from benchmarks.step_run import simulated
from lightning_zenflow.monitor.plot import draw_lanes, lanes

PICTURE = records.ROOT / "docs" / "images" / "timelines.png"

_SHOWN_STEPS = 2
"""Of ZeRO-Offload's."""
_TITLES = {"zero_offload": "DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)", "zenflow": "ZenFlowStrategy, S = 4, d = 1"}
_LANE_NAMES = {
    "zero_offload": {"exact step": "CPU: norm, clip, AdamW", "waits of the training thread": "device waits"},
    "zenflow": {
        "exact step": "device: selected columns",
        "provisional update": "device: stand-in",
        "waits of the training thread": "device waits",
    },
}
"""On the simulated device the training thread is the device."""

Trace = dict[str, Any]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--params", type=float, default=59e6, help="weights of the simulated accelerator's model")
    add("--compute-ms", type=float, default=210.0, help="its forward and backward")
    add("--steps", type=int, default=12, help="steps that are recorded")
    add("--warm-up", type=int, default=6, help="steps before them")
    add("--timeout", type=float, default=300, help="longest time of a training in seconds")
    add("--png", type=Path, default=PICTURE, metavar="FILE")
    return parser.parse_args(arguments)


def steps_of(trace: Trace) -> list[dict[str, Any]]:
    """The events that stand for whole steps, in order."""
    return [event for event in trace["traceEvents"] if event.get("cat") == "step"]


def median_us(trace: Trace) -> float:
    """Length of its steps."""
    return median(step["dur"] for step in steps_of(trace))


def typical_step(trace: Trace, *, before_last: int) -> dict[str, Any]:
    """The step whose length is nearest to the median, among those that have so many after them; the first if none has."""
    steps, middle = steps_of(trace), median_us(trace)
    return min(steps[: max(1, len(steps) - before_last)], key=lambda step: abs(step["dur"] - middle))


def from_time(trace: Trace, begin_us: float) -> Trace:
    """The same trace with this time as zero."""
    events = [{**e, "ts": e["ts"] - begin_us} if e["ph"] == "X" else e for e in trace["traceEvents"]]
    return {**trace, "traceEvents": events}


def with_names(trace: Trace, names: Mapping[str, str]) -> Trace:
    """The same trace with other names of lanes."""

    def renamed(event: dict[str, Any]) -> dict[str, Any]:
        if event["name"] != "thread_name":
            return event
        name = event["args"]["name"]
        return {**event, "args": {"name": names.get(name, name)}}

    return {**trace, "traceEvents": [renamed(event) for event in trace["traceEvents"]]}


def draw(traces: Mapping[str, Trace], path: Path, *, about: str) -> None:
    """Draws them over each other with one axis of time, which ends with the ZeRO-Offload steps that are shown.

    Args:
        traces: method -> timeline.
        path: the PNG file.
        about: what was measured, where and when.
    """
    from matplotlib.figure import Figure

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
    """Entry point; the exit status is 1 if a training failed."""
    options = parse_arguments(arguments)
    spec = simulated(
        "zero_offload",
        params=options.params,
        compute_ms=options.compute_ms,
        warm_up=options.warm_up,
        steps=options.steps,
    )
    traces: dict[str, Trace] = {}
    cores = sorted(os.sched_getaffinity(0))
    for method in _TITLES:
        given = json.dumps(vars(replace(spec, method=method)))
        ended = run_process("benchmarks.timeline_run", [given], cores=cores, environment={}, timeout=options.timeout)
        if ended.result is None:
            print(f"{method}: FAILED: {ended.error}")
            return 1
        traces[method] = json.loads(ended.result)
        print(f"{method}: {median_us(traces[method]) / 1e3:.0f} ms a step", flush=True)
    about = (
        f"simulated accelerator, {options.params / 1e6:g} M parameters, {options.compute_ms:g} ms forward and backward;"
        f" {records.hardware()}, commit {records.commit_of_code()}, {date.today().isoformat()}"
    )
    draw(traces, options.png, about=about)
    print(f"{options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
