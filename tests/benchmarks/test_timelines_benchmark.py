"""The picture of measured timelines: the recorded phases of ZeRO-Offload, and the common time axis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.step_time import timelines
from benchmarks.step_time.drawing import lanes
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.run import StepSpec

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
    for step, wait in zip(timelines.steps_of(trace), spans_of(trace, WAITS), strict=True):
        number = step["args"]["step"]
        phases, copies = (
            [e for e in spans_of(trace, name) if e["args"]["step"] == number] for name in ("exact step", "h2d copies")
        )
        assert [e["name"] for e in phases] == ["norm", "clip", "AdamW"]
        assert all(wait["ts"] <= e["ts"] <= wait["ts"] + wait["dur"] for e in phases + copies)
