"""Spans of the training thread, of the device and of the worker, recorded in selected steps.

In all other steps a span costs one comparison.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
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
    """An interval on the host's monotonic clock (CLOCK_MONOTONIC, which the worker reads too). Spans of one lane do not overlap."""

    lane: Lane
    name: str
    begin_ns: int
    end_ns: int
    n_bytes: int = 0
    """Bytes copied."""
    waits: bool = False
    """True for idle time of the thread or the device."""

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return 1e-9 * (self.end_ns - self.begin_ns)


@dataclass(frozen=True, kw_only=True)
class _DeviceSpan:
    """A span between two events of the device, whose times are known once the device has reached them."""

    lane: Lane
    name: str
    before: Event
    after: Event
    n_bytes: int = 0
    waits: bool = False

    @property
    def seconds(self) -> float:
        return 1e-3 * self.before.elapsed_time(self.after)


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """An event of the device and the time on the host's clock at which the device reached it."""

    event: Event
    host_ns: int

    def ns_of(self, event: Event) -> int:
        """A later event's time on the host's clock."""
        return self.host_ns + round(1e6 * self.event.elapsed_time(event))


@dataclass(kw_only=True)
class StepTrace:
    """Spans of one optimizer step, from the end of the previous step to its own."""

    step: int
    begin_ns: int
    end_ns: int | None = None
    """None until the step ends."""
    anchor: Anchor | None = None
    """Converts the device's times to the host's clock; None in recordings that only need durations."""
    host_spans: list[Span] = field(default_factory=list)
    device_spans: list[_DeviceSpan] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True once step and device have finished. Does not wait."""
        return self.end_ns is not None and all(span.after.query() for span in self.device_spans)

    def spans(self) -> list[Span]:
        """All spans of a complete step, ordered by their beginning."""
        spans = [*self.host_spans, *map(self._on_host_clock, self.device_spans)]
        return sorted(spans, key=lambda span: span.begin_ns)

    def copied(self, lane: Lane, name: str | None = None) -> tuple[int, float]:
        """Bytes and seconds of a lane's spans in a complete step; those of one name if given."""
        every: list[Span | _DeviceSpan] = [*self.host_spans, *self.device_spans]
        spans = [span for span in every if span.lane == lane and name in (None, span.name)]
        return sum(span.n_bytes for span in spans), sum(span.seconds for span in spans)

    def _on_host_clock(self, span: _DeviceSpan) -> Span:
        assert self.anchor is not None, "the recording must be aligned"
        begin_ns, end_ns = self.anchor.ns_of(span.before), self.anchor.ns_of(span.after)
        return Span(
            lane=span.lane, name=span.name, begin_ns=begin_ns, end_ns=end_ns, n_bytes=span.n_bytes, waits=span.waits
        )


@dataclass(kw_only=True)
class Recording:
    """Traces of steps `first` to `last`, filled while training goes on."""

    first: int
    last: int
    aligned: bool
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True once all steps are complete. Does not wait."""
        return len(self.steps) == self.last - self.first + 1 and all(step.complete for step in self.steps)


class Tracer:
    """Records spans in requested steps. Used by the training thread of one rank only.

    Args:
        device: the training device.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._step = 0
        self._recordings: list[Recording] = []
        self._current: StepTrace | None = None
        self._anchor: Anchor | None = None

    def record(self, *, skip: int, steps: int, aligned: bool = False) -> Recording:
        """Requests a recording.

        Args:
            skip: steps before the first recorded one; 0: the current step is the first.
            steps: number of recorded steps.
            aligned: place the device's spans on the host's clock. This synchronises the device once, before the first recorded step, so
                `skip` must be > 0.
        """
        assert skip > 0 or not aligned
        first = self._step + skip
        recording = Recording(first=first, last=first + steps - 1, aligned=aligned)
        self._recordings.append(recording)
        if skip == 0:
            self._resume()
        return recording

    @property
    def needs_alignment(self) -> bool:
        """True if `align` must be called before the next step."""
        return self._runtime.runs_behind and any(r.aligned and r.first == self._step + 1 for r in self._recordings)

    def align(self) -> None:
        """Measures the offset of the device's clock to the host's. Synchronises the device."""
        event = self._runtime.record_event(timing=True)
        event.synchronize()
        self._anchor = Anchor(event=event, host_ns=time.perf_counter_ns())

    def begin_step(self, step: int) -> None:
        """Ends the previous step and begins the given one; idempotent."""
        if step == self._step:
            return
        if self._current is not None:
            self._current.end_ns = time.perf_counter_ns()
            self._current = None
        self._step = step
        if self._recordings:
            self._recordings = [r for r in self._recordings if r.last >= step]
            self._resume()

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
        trace = self._current
        if trace is None:
            return
        lane: Lane = "waits of the training thread"
        trace.host_spans.append(Span(lane=lane, name=cause, begin_ns=begin_ns, end_ns=end_ns, waits=True))
        if events is not None:
            before, after = events
            span = _DeviceSpan(lane="waits of the device", name=cause, before=before, after=after, waits=True)
            trace.device_spans.append(span)

    def add_job(self, block: int, done: Completion) -> None:
        """Records a job of the worker: its wait for the gradients, then the computation of its threads together."""
        if self._current is not None:
            begin_ns, arrived_ns = done.start_ns, done.start_ns + done.wait_ns
            self._current.host_spans += [
                Span(lane="worker", name="wait for gradients", begin_ns=begin_ns, end_ns=arrived_ns, waits=True),
                Span(lane="worker", name=f"block {block}", begin_ns=arrived_ns, end_ns=arrived_ns + done.busy_ns),
            ]

    def _resume(self) -> None:
        """Records the current step from now on if it is part of a recording."""
        requested = [r for r in self._recordings if r.first <= self._step <= r.last]
        if not requested:
            return
        if self._current is None:
            self._current = StepTrace(step=self._step, begin_ns=time.perf_counter_ns(), anchor=self._anchor)
        for recording in requested:
            if self._current not in recording.steps:
                recording.steps.append(self._current)

    @contextmanager
    def _span(self, trace: StepTrace, lane: Lane, name: str, n_bytes: int) -> Iterator[None]:
        if self._runtime.runs_behind:
            before = self._runtime.record_event(timing=True)
            yield
            after = self._runtime.record_event(timing=True)
            trace.device_spans.append(_DeviceSpan(lane=lane, name=name, before=before, after=after, n_bytes=n_bytes))
        else:
            begin_ns = time.perf_counter_ns()
            yield
            end_ns = time.perf_counter_ns()
            trace.host_spans.append(Span(lane=lane, name=name, begin_ns=begin_ns, end_ns=end_ns, n_bytes=n_bytes))
