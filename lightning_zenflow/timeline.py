"""Recorded steps as a file in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure Python."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zenflow.tracing import LANES, Span, StepTrace

STEP_LANE = "steps"
_TRAINING, _WORKER = 1, 2
_WAIT_COLOUR = "terrible"
"""The format's name for red."""


def chrome_trace(steps: Sequence[StepTrace], *, worker: str = "worker") -> dict[str, Any]:
    """The trace of complete steps.

    Args:
        steps: in order.
        worker: what to call the worker process.

    Returns:
        The JSON object: one lane ("thread") for each of `tracing.LANES` that has spans, several for the worker's threads, and one for the
        steps; times in microseconds from the beginning of the first. Waits have the category "wait" and are red.
    """
    spans = [(step.step, span) for step in steps for span in step.spans()]
    begin_ns = min([step.begin_ns for step in steps] + [span.begin_ns for _, span in spans], default=0)
    events: list[dict[str, Any]] = [
        _name(_TRAINING, 0, "process_name", "training"),
        _name(_WORKER, 0, "process_name", worker),
    ]
    used = {(LANES.index(span.lane), span.threads.start): _lane_name(span) for _, span in spans}
    lanes = [STEP_LANE, *(used[place] for place in sorted(used))]
    for number, lane in enumerate(lanes):
        events.append(_name(_process(lane), number + 1, "thread_name", lane))
        sort_index = {"name": "thread_sort_index", "ph": "M", "pid": _process(lane), "tid": number + 1}
        events.append({**sort_index, "args": {"sort_index": number}})
    timed = [_event(step, span, begin_ns, lanes.index(_lane_name(span)) + 1) for step, span in spans]
    for step in steps:
        assert step.end_ns is not None, "only complete steps can be written"
        timed.append(
            {
                "name": f"step {step.step}",
                "cat": "step",
                "ph": "X",
                "pid": _TRAINING,
                "tid": 1,
                "ts": (step.begin_ns - begin_ns) / 1e3,
                "dur": (step.end_ns - step.begin_ns) / 1e3,
                "args": {"step": step.step},
            }
        )
    events += sorted(timed, key=lambda event: event["ts"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Writes a trace, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace))


def read_trace(path: Path) -> dict[str, Any]:
    """Reads what `write_trace` wrote.

    Raises:
        ValueError: it is no trace in the Chrome format.
    """
    try:
        trace = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path}: no trace in the Chrome format: `traceEvents` is missing")
    return trace


def _lane_name(span: Span) -> str:
    if span.lane != "worker":
        return span.lane
    first, last = span.threads[0], span.threads[-1]
    return f"worker thread {first}" if first == last else f"worker threads {first} to {last}"


def _process(lane: str) -> int:
    return _WORKER if lane.startswith("worker") else _TRAINING


def _name(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(step: int, span: Span, begin_ns: int, tid: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": step}
    if span.n_bytes:
        arguments["bytes"] = span.n_bytes
    event = {
        "name": span.name,
        "cat": "wait" if span.waits else span.lane,
        "ph": "X",
        "pid": _process(span.lane),
        "tid": tid,
        "ts": (span.begin_ns - begin_ns) / 1e3,
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "args": arguments,
    }
    return {**event, "cname": _WAIT_COLOUR} if span.waits else event
