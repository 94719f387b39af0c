"""What happened when, in the steps that somebody asked to see: spans of the training thread, of the device and of the worker.

Nothing is recorded, and next to nothing spent, in all other steps.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import torch

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
"""Where a span is drawn. On a CUDA device those of the first six are the device's own times."""

LANES: tuple[Lane, ...] = get_args(Lane)

MAX_WORKER_LANES = 16
"""More threads than that share lanes."""

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time, by the host's monotonic clock (CLOCK_MONOTONIC, which the worker reads as well). Spans of one lane, of the
    same threads, do not overlap.
    """

    lane: Lane
    name: str
    begin_ns: int
    end_ns: int
    n_bytes: int = 0
    """What was copied, if anything."""
    waits: bool = False
    """Whether somebody had nothing to do."""
    threads: range = range(1)
    """Which of the worker's, in its lanes."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return 1e-9 * (self.end_ns - self.begin_ns)


@dataclass(frozen=True, kw_only=True)
class _DeviceSpan:
    """A span between two events of a CUDA stream; its times are known once the device has reached them."""

    lane: Lane
    name: str
    before: torch.cuda.Event
    after: torch.cuda.Event
    n_bytes: int
    waits: bool


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A CUDA event and the host's time when the device reached it."""

    event: torch.cuda.Event
    host_ns: int


@dataclass(kw_only=True)
class StepTrace:
    """One optimizer step, from the end of the one before to its own."""

    step: int
    begin_ns: int
    end_ns: int | None = None
    """None while the step goes on."""
    anchor: Anchor | None = None
    """How the device's times become the host's; None where nobody needs to know when things happened, but only how long they took."""
    host_spans: list[Span] = field(default_factory=list)
    device_spans: list[_DeviceSpan] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the step has ended and the device is through with it. Does not wait."""
        return self.end_ns is not None and all(span.after.query() for span in self.device_spans)  # type: ignore[no-untyped-call]

    def spans(self) -> list[Span]:
        """All spans of a complete step, in order of their beginning."""
        spans = [*self.host_spans, *map(self._on_host_clock, self.device_spans)]
        return sorted(spans, key=lambda span: span.begin_ns)

    def copied(self, lane: Lane, name: str | None = None) -> tuple[int, float]:
        """Bytes and seconds of one lane's spans, or of those with a name, in a complete step."""

        def counts(span: Span | _DeviceSpan) -> bool:
            return span.lane == lane and name in (None, span.name)

        bytes_and_seconds = [(span.n_bytes, span.seconds) for span in self.host_spans if counts(span)]
        for span in self.device_spans:
            if counts(span):
                bytes_and_seconds.append((span.n_bytes, 1e-3 * span.before.elapsed_time(span.after)))
        return sum(n for n, _ in bytes_and_seconds), sum(s for _, s in bytes_and_seconds)

    def _on_host_clock(self, span: _DeviceSpan) -> Span:
        assert self.anchor is not None, "only aligned recordings know when the device did something"
        begin_ns = self.anchor.host_ns + round(1e6 * self.anchor.event.elapsed_time(span.before))
        return Span(
            lane=span.lane,
            name=span.name,
            begin_ns=begin_ns,
            end_ns=begin_ns + round(1e6 * span.before.elapsed_time(span.after)),
            n_bytes=span.n_bytes,
            waits=span.waits,
        )


@dataclass(kw_only=True)
class Recording:
    """What somebody asked to see: steps `first` to `last`, which fill up while training goes on."""

    first: int
    last: int
    aligned: bool
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all steps have ended and the device is through with them. Does not wait."""
        return len(self.steps) == self.last - self.first + 1 and all(step.complete for step in self.steps)


class Tracer:
    """Records the steps that were asked for. Belongs to one rank's training thread.

    Args:
        device: what trains.
        worker_threads: how many threads the worker has.
    """

    def __init__(self, device: torch.device, *, worker_threads: int) -> None:
        self._device = device
        n_lanes = min(worker_threads, MAX_WORKER_LANES)
        bounds = [worker_threads * i // n_lanes for i in range(n_lanes + 1)]
        self._worker_lanes = [range(*of_lane) for of_lane in pairwise(bounds)]
        self._on_cuda = device.type == "cuda"
        self._step = 0
        self._recordings: list[Recording] = []
        self._current: StepTrace | None = None
        self._anchor: Anchor | None = None

    def record(self, *, skip: int, steps: int, aligned: bool = False) -> Recording:
        """Asks for a recording.

        Args:
            skip: steps left out before it; 0: the one that has just begun is the first.
            steps: how many.
            aligned: whether it matters when the device did something, and not only for how long. For that the device is waited for before
                the first step, which cannot have begun already.
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
        """Whether the device must be waited for before the next step (`align`)."""
        return self._on_cuda and any(r.aligned and r.first == self._step + 1 for r in self._recordings)

    def align(self) -> None:
        """Finds out how the device's times become the host's. Waits for the device."""
        event = _event()
        event.synchronize()
        self._anchor = Anchor(event=event, host_ns=time.perf_counter_ns())

    def begin_step(self, step: int) -> None:
        """Ends the step before and begins the next one; the same number again changes nothing."""
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
        """Records what is done inside, on the device's clock where it is enqueued there."""
        return _NOTHING if self._current is None else self._span(self._current, lane, name or lane, n_bytes)

    def add_wait(
        self, cause: str, begin_ns: int, end_ns: int, events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    ) -> None:
        """Notes a wait of the training thread, and the events between which the device may have had nothing to do."""
        trace = self._current
        if trace is None:
            return
        lane: Lane = "waits of the training thread"
        trace.host_spans.append(Span(lane=lane, name=cause, begin_ns=begin_ns, end_ns=end_ns, waits=True))
        if events is not None:
            before, after = events
            span = _DeviceSpan(
                lane="waits of the device", name=cause, before=before, after=after, n_bytes=0, waits=True
            )
            trace.device_spans.append(span)

    def add_job(self, block: int, completion: Completion) -> None:
        """Notes what the worker reported of one round. Its first thread waits for the gradients, the others sleep meanwhile."""
        if self._current is None:
            return
        begin_ns = completion.start_ns
        wait = Span(
            lane="worker",
            name="wait for gradients",
            begin_ns=begin_ns,
            end_ns=begin_ns + completion.wait_ns,
            waits=True,
            threads=self._worker_lanes[0],
        )
        self._current.host_spans.append(wait)
        for threads in self._worker_lanes:
            # Small blocks are for some of the threads only.
            if worked := completion.threads[threads.start : threads.stop]:
                busy = Span(
                    lane="worker",
                    name=f"block {block}",
                    begin_ns=min(span.begin_ns for span in worked),
                    end_ns=max(span.end_ns for span in worked),
                    threads=threads,
                )
                self._current.host_spans.append(busy)

    def _resume(self) -> None:
        """Begins to record the present step if anybody wants it."""
        wanting = [r for r in self._recordings if r.first <= self._step <= r.last]
        if not wanting:
            return
        if self._current is None:
            self._current = StepTrace(step=self._step, begin_ns=time.perf_counter_ns(), anchor=self._anchor)
        for recording in wanting:
            if self._current not in recording.steps:
                recording.steps.append(self._current)

    @contextmanager
    def _span(self, trace: StepTrace, lane: Lane, name: str, n_bytes: int) -> Iterator[None]:
        if self._on_cuda:
            before = _event()
            yield
            span = _DeviceSpan(lane=lane, name=name, before=before, after=_event(), n_bytes=n_bytes, waits=False)
            trace.device_spans.append(span)
        else:
            begin_ns = time.perf_counter_ns()
            yield
            end_ns = time.perf_counter_ns()
            trace.host_spans.append(Span(lane=lane, name=name, begin_ns=begin_ns, end_ns=end_ns, n_bytes=n_bytes))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
