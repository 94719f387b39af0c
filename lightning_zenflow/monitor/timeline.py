"""Timeline of recorded steps in the Chrome trace format (for ui.perfetto.dev and chrome://tracing), and the callback that writes it."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_zenflow.monitor.interface import MonitoredOptimizer, rank_zero_optimizer
from lightning_zenflow.telemetry.tracing import LANES, Recording, Span, StepTrace

STEP_LANE = "steps"

_TRAINING, _WORKER = 1, 2

_WAIT_COLOUR = "terrible"
"""The format's name for red."""

_log = logging.getLogger(__name__)


def chrome_trace(steps: Sequence[StepTrace], *, worker_cores: Sequence[int] = ()) -> dict[str, Any]:
    """Converts the traces of complete steps.

    Args:
        steps: in order.
        worker_cores: logical cores of the worker, for the name of its process.

    Returns:
        A JSON object with one lane ("thread") for the steps, one for each of `tracing.LANES` that has spans, and several for the worker's
        threads. Times are in microseconds since the beginning of the first step. Waits have the category "wait" and are red.
    """
    worker = f"worker on cores {list(worker_cores)}" if worker_cores else "worker"
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
        assert step.end_ns is not None, "steps must be complete"
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
    """Writes a trace as JSON and creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace))


def read_trace(path: Path) -> dict[str, Any]:
    """Reads a trace.

    Raises:
        ValueError: the file is not in the Chrome trace format.
    """
    try:
        trace = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON file, got: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} must be a trace in the Chrome format, got JSON without a list `traceEvents`")
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


class TimelineFile:
    """Records steps, from its own construction on, and writes their timeline once they are complete.

    Args:
        path: JSON file to write.
        optimizer: source of the recording.
        first: first recorded step, counted from 1; > 1, since the device is synchronised before it.
        last: last recorded step.
    """

    def __init__(self, path: Path, optimizer: MonitoredOptimizer, *, first: int, last: int) -> None:
        assert 1 < first <= last
        self._path = path
        self._first = first
        self._optimizer = optimizer
        self._recording: Recording | None = optimizer.telemetry.tracer.record(
            skip=first - 1, steps=last - first + 1, aligned=True
        )

    def end_step(self) -> None:
        """Writes the file if the recording is complete."""
        if self._recording is not None and self._recording.complete:
            self.close()

    def close(self) -> None:
        """Writes what has been recorded, if it has not been written. Logs an error, since training goes on without the file."""
        if self._recording is None:
            return
        steps = [step for step in self._recording.steps if step.complete]
        self._recording = None
        if not steps:
            _log.warning("ZenFlow: timeline=%r: training ended before step %d", str(self._path), self._first)
            return
        try:
            write_trace(chrome_trace(steps, worker_cores=self._optimizer.worker_cores), self._path)
        except OSError as error:
            _log.warning("ZenFlow: timeline=%r could not be written: %s", str(self._path), error)
            return
        rank_zero_info(f"ZenFlow: timeline of steps {steps[0].step} to {steps[-1].step} in {self._path}")


class TimelineWriter(pl.Callback):
    """Writes the timeline of rank zero; arguments as `TimelineFile`, steps counted from the start of fit."""

    def __init__(self, path: Path, *, first: int, last: int) -> None:
        self._path = path
        self._first, self._last = first, last
        self._file: TimelineFile | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = rank_zero_optimizer(trainer)
        if optimizer is not None:
            self._file = TimelineFile(self._path, optimizer, first=self._first, last=self._last)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._file is not None:
            self._file.end_step()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
