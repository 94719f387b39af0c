"""The picture of measured timelines: the recorded phases of ZeRO-Offload, and the common time axis."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.step_time import timelines
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.run import StepSpec
from lightning_zenflow.monitor.plot import lanes

WAITS = "waits of the training thread"


def record(method: str) -> dict[str, Any]:
    spec = StepSpec(device="simulated", method=method, params=8.4e6, compute_s=0.004, warm_up=2, steps=6)
    with pytest.MonkeyPatch.context() as patch:
        # DeepSpeed's own AdamW would be compiled first.
        patch.setitem(METHODS, method, replace(METHODS[method], optimizer=torch.optim.AdamW))
        return timelines.record(spec)


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    (tid,) = [tid for (_, tid), lane in lanes(trace).items() if lane == name]
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == tid]


def test_zero_offload_waits_while_the_cpu_works(tmp_path: Path) -> None:
    traces = {method: record(method) for method in ("zero_offload", "zenflow")}
    timelines.draw(traces, tmp_path / "out.png", about="a test")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    trace = traces["zero_offload"]
    assert [step["name"] for step in timelines.steps_of(trace)] == [f"step {n}" for n in range(3, 9)]
    # In microseconds, rounded.
    assert all(one["ts"] + one["dur"] <= next_["ts"] + 1 for one, next_ in pairwise(timelines.steps_of(trace)))
    weights = 2 * 4096 * 1024
    for step, wait in zip(timelines.steps_of(trace), spans_of(trace, WAITS), strict=True):
        number = step["args"]["step"]
        of_step = {
            name: [e for e in spans_of(trace, name) if e["args"]["step"] == number] for name in lanes(trace).values()
        }
        assert [e["name"] for e in of_step["exact step"]] == ["norm", "clip", "AdamW"]
        assert sum(e["args"]["bytes"] for e in of_step["d2h copies"]) == 4 * weights
        assert sum(e["args"]["bytes"] for e in of_step["h2d copies"]) == 2 * weights
        (forward,), (backward,) = of_step["forward"], of_step["backward"]
        assert step["ts"] <= forward["ts"] < backward["ts"] < wait["ts"]
        assert all(backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"] for e in of_step["d2h copies"])
        assert wait["cat"] == "wait"
        assert all(
            wait["ts"] <= e["ts"] <= wait["ts"] + wait["dur"] for e in of_step["exact step"] + of_step["h2d copies"]
        )


def test_a_step_of_median_length_comes_first() -> None:
    steps = [
        {"ph": "X", "cat": "step", "name": "", "ts": 10.0 * i, "dur": dur} for i, dur in enumerate([9.0, 5.0, 4.0, 5.0])
    ]
    trace = {"traceEvents": steps}
    assert timelines.typical_step(trace, before_last=1) == steps[1]
    assert timelines.typical_step(trace, before_last=9) == steps[0]
    assert [step["ts"] for step in timelines.from_time(trace, 10)["traceEvents"]] == [-10, 0, 10, 20]
