"""Spans of the training thread, of the device and of the worker, recorded in selected steps.

In all other steps a span costs one comparison.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from lightning_zenflow.core.device import Event, runtime_of
from lightning_zenflow.telemetry.counters import Completion

Lane = Literal[
    "forward",
    "backward",
    "exact step",
    "provisional update",
    "d2h copies",
    "h2d copies",
    "waits of the training thread",
    "waits of the device",
    "worker",
]
"""Row of a timeline. On a CUDA device the first six have the device's own times."""

LANES: tuple[Lane, ...] = get_args(Lane)

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval on the host's monotonic clock (CLOCK_MONOTONIC, which the worker reads too), or between two events of the device.

    Spans of one lane do not overlap.
    """

    lane: Lane
    name: str
    begin_ns: int = 0
    end_ns: int = 0
    events: tuple[Event, Event] | None = None
    """Of the device, which has its times once it has reached them; both of the others are 0 then."""
    n_bytes: int = 0
    """Bytes copied."""
    waits: bool = False
    """True for idle time of the thread or the device."""

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        if self.events is not None:
            return 1e-3 * self.events[0].elapsed_time(self.events[1])
        return 1e-9 * (self.end_ns - self.begin_ns)


@dataclass(kw_only=True)
class StepTrace:
    """Spans of one optimizer step, from the end of the previous step to its own."""

    step: int
    begin_ns: int
    end_ns: int | None = None
    """None until the step ends."""
    anchor: tuple[Event, int] | None = None
    """An event of the device, and the host's time at which the device reached it; None in recordings that only need durations."""
    recorded: list[Span] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True once step and device have finished. Does not wait."""
        return self.end_ns is not None and all(span.events is None or span.events[1].query() for span in self.recorded)

    def spans(self) -> list[Span]:
        """All spans of a complete step on the host's clock, ordered by their beginning."""
        return sorted(map(self._on_host_clock, self.recorded), key=lambda span: span.begin_ns)

    def copied(self, lane: Lane, name: str | None = None) -> tuple[int, float]:
        """Bytes and seconds of a lane's spans in a complete step; those of one name if given."""
        spans = [span for span in self.recorded if span.lane == lane and name in (None, span.name)]
        return sum(span.n_bytes for span in spans), sum(span.seconds for span in spans)

    def _on_host_clock(self, span: Span) -> Span:
        if span.events is None:
            return span
        assert self.anchor is not None, "the recording must be aligned"
        event, host_ns = self.anchor
        begin_ns, end_ns = (host_ns + round(1e6 * event.elapsed_time(e)) for e in span.events)
        return replace(span, begin_ns=begin_ns, end_ns=end_ns, events=None)


@dataclass(kw_only=True)
class Recording:
    """Traces of some steps in a row, filled while training goes on."""

    skip: int
    """Steps before them that are still to come, the current one included."""
    n_steps: int
    aligned: bool
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether the last step has begun."""
        return len(self.steps) == self.n_steps

    @property
    def complete(self) -> bool:
        """True once all steps are complete. Does not wait."""
        return self.is_full and all(step.complete for step in self.steps)


class Tracer:
    """Records spans in requested steps. Used by the training thread of one rank only.

    Args:
        device: the training device.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._step = 0
        self._recordings: list[Recording] = []  # requested, and not over
        self._current: StepTrace | None = None
        self._anchor: tuple[Event, int] | None = None

    def record(self, *, skip: int, steps: int = 1, aligned: bool = False) -> Recording:
        """Requests a recording.

        Args:
            skip: steps before the first recorded one, the current step included; > 0.
            steps: number of recorded steps.
            aligned: place the device's spans on the host's clock. This synchronises the device once, before the first recorded step.
        """
        assert skip > 0
        self._recordings.append(Recording(skip=skip, n_steps=steps, aligned=aligned))
        return self._recordings[-1]

    @property
    def needs_alignment(self) -> bool:
        """True if `align` must be called before the next step."""
        return self._runtime.runs_behind and any(r.aligned and r.skip == 1 for r in self._recordings)

    def align(self) -> None:
        """Measures the offset of the device's clock to the host's. Synchronises the device."""
        event = self._runtime.record_event(timing=True)
        event.synchronize()
        self._anchor = event, time.perf_counter_ns()

    def begin_step(self, step: int) -> None:
        """Ends the previous step and begins the given one; idempotent."""
        if step == self._step:
            return
        if self._current is not None:
            self._current.end_ns = time.perf_counter_ns()
        # Otherwise a checkpoint has been loaded, and no step is over.
        n_over = int(step == self._step + 1)
        self._step, self._current = step, None
        if self._recordings:
            self._recordings = [r for r in self._recordings if not r.is_full]
            for recording in self._recordings:
                recording.skip -= n_over
            requested = [r for r in self._recordings if r.skip <= 0]
            if requested:
                self._current = trace = StepTrace(step=step, begin_ns=time.perf_counter_ns(), anchor=self._anchor)
                for recording in requested:
                    recording.steps.append(trace)

    def span(self, lane: Lane, name: str = "", *, n_bytes: int = 0) -> AbstractContextManager[None]:
        """Records the context as a span: on a CUDA device the work enqueued in it, on a CPU device its execution.

        Args:
            lane: the lane.
            name: the lane's name by default.
            n_bytes: bytes copied.
        """
        return _NOTHING if self._current is None else self._span(self._current, lane, name or lane, n_bytes)

    def add_wait(self, cause: str, begin_ns: int, end_ns: int, events: tuple[Event, Event] | None) -> None:
        """Records a wait of the training thread, on the host's clock, and the CUDA events between which the device was idle."""
        if self._current is not None:
            spans = self._current.recorded
            lane: Lane = "waits of the training thread"
            spans.append(Span(lane=lane, name=cause, begin_ns=begin_ns, end_ns=end_ns, waits=True))
            if events is not None:
                spans.append(Span(lane="waits of the device", name=cause, events=events, waits=True))

    def add_job(self, block: int, done: Completion) -> None:
        """Records a job of the worker: its wait for the gradients, then the computation of its threads together."""
        if self._current is not None:
            begin_ns, arrived_ns = done.start_ns, done.start_ns + done.wait_ns
            self._current.recorded += [
                Span(lane="worker", name="wait for gradients", begin_ns=begin_ns, end_ns=arrived_ns, waits=True),
                Span(lane="worker", name=f"block {block}", begin_ns=arrived_ns, end_ns=arrived_ns + done.busy_ns),
            ]

    @contextmanager
    def _span(self, trace: StepTrace, lane: Lane, name: str, n_bytes: int) -> Iterator[None]:
        runs_behind, begin_ns = self._runtime.runs_behind, time.perf_counter_ns()
        before = self._runtime.record_event(timing=True) if runs_behind else None
        yield
        if before is not None:
            events = before, self._runtime.record_event(timing=True)
            trace.recorded.append(Span(lane=lane, name=name, events=events, n_bytes=n_bytes))
        else:
            end_ns = time.perf_counter_ns()
            trace.recorded.append(Span(lane=lane, name=name, begin_ns=begin_ns, end_ns=end_ns, n_bytes=n_bytes))
