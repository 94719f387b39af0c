"""Timeline of recorded steps in the Chrome trace format (for ui.perfetto.dev and chrome://tracing), and the file that has it."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_zenflow.telemetry.tracing import LANES, Recording, StepTrace

if TYPE_CHECKING:
    from lightning_zenflow.engine.optimizer import ZenFlowOptimizer

STEP_LANE = "steps"

_PROCESS = {"pid": 1}

_WAIT_COLOUR = "terrible"
"""The format's name for red."""

_log = logging.getLogger(__name__)


def chrome_trace(steps: Sequence[StepTrace], *, worker_cores: Sequence[int] = ()) -> dict[str, Any]:
    """Converts the traces of complete steps.

    Args:
        steps: in order.
        worker_cores: logical cores of the worker, for the process' name.

    Returns:
        A JSON object with one lane ("thread") for the steps and one for each of `tracing.LANES` that has spans. Times are in microseconds
        since the beginning of the first step. Waits have the category "wait" and are red.
    """
    spans = [(step.step, span) for step in steps for span in step.spans()]
    start_ns = min([step.begin_ns for step in steps] + [span.begin_ns for _, span in spans], default=0)
    lanes = [STEP_LANE, *(lane for lane in LANES if any(span.lane == lane for _, span in spans))]
    process = f"training, worker on cores {list(worker_cores)}" if worker_cores else "training"
    metadata = [{"name": "process_name", "tid": 0, "args": {"name": process}}]
    for number, lane in enumerate(lanes):
        metadata.append({"name": "thread_name", "tid": number + 1, "args": {"name": lane}})
        metadata.append({"name": "thread_sort_index", "tid": number + 1, "args": {"sort_index": number}})
    events: list[dict[str, Any]] = []

    def add(lane: str, name: str, begin_ns: int, end_ns: int, category: str, **arguments: int) -> None:
        times = {"ts": (begin_ns - start_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        colour = {"cname": _WAIT_COLOUR} if category == "wait" else {}
        place = {**_PROCESS, "tid": lanes.index(lane) + 1}
        events.append({"name": name, "cat": category, "ph": "X", **place, **times, "args": arguments, **colour})

    for step in steps:
        assert step.end_ns is not None, "steps must be complete"
        add(STEP_LANE, f"step {step.step}", step.begin_ns, step.end_ns, "step", step=step.step)
    for number, span in spans:
        arguments = {"step": number, "bytes": span.n_bytes} if span.n_bytes else {"step": number}
        add(span.lane, span.name, span.begin_ns, span.end_ns, "wait" if span.waits else span.lane, **arguments)
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [{"ph": "M", **_PROCESS, **event} for event in metadata] + events, "displayTimeUnit": "ms"}


class TimelineFile:
    """Records steps, from its own construction on, and writes their timeline once they are complete.

    Args:
        path: JSON file to write.
        optimizer: source of the recording.
        first: first recorded step, counted from 1; > 1, since the device is synchronised before it.
        last: last recorded step.
    """

    def __init__(self, path: Path, optimizer: "ZenFlowOptimizer", *, first: int, last: int) -> None:
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
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(chrome_trace(steps, worker_cores=self._optimizer.worker_cores)))
        except OSError as error:
            _log.warning("ZenFlow: timeline=%r could not be written: %s", str(self._path), error)
            return
        rank_zero_info(f"ZenFlow: timeline of steps {steps[0].step} to {steps[-1].step} in {self._path}")
