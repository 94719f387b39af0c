"""Predicted timeline of recorded steps: the same order, with durations.

An operation begins when the host has enqueued it, its stream has come to it, the events that the stream waits for are reached, and its
engine is free. There are three engines: computation, and a copy engine for each direction. An engine takes what was enqueued first, and
what was enqueued later where it fits in between. The host enqueues in the recorded order; it waits where it did in the recording. The
worker's jobs run one after the other; each begins when it is submitted and the word that it waits for is there.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.recorded_device.clocks import HOST, MAIN, Operation
from benchmarks.recorded_device.rates import Rates, Scale, is_models
from lightning_zenflow.telemetry.tracing import Lane, Span, StepTrace

Cause = Literal["launches", "copies", "worker", "latency"]
"""Why the device computes nothing: the host has not enqueued more yet; a copy is waited for; the host waits for the worker; the next
operation of the stream only begins after `Rates.launch_s`."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

_ENGINES = {"launch": "compute", "d2h": "d2h", "h2d": "h2d"}
_UNITED_NS = 20_000
"""Operations of a lane that follow each other within this time are drawn as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """An operation with its time on an engine, in seconds."""

    operation: Operation
    ready: float
    """From when on it only waited for its engine."""
    begin: float
    end: float
    behind: "Timed | None"
    """The operation that its stream waited for last; None: it began no earlier because the host did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Idle time, of the host or of the device."""

    begin: float
    end: float
    cause: Cause


Reached = tuple[float, Timed | None]
"""A time, and the operation that ended then; None: the host."""


_Gap = tuple[float, float]


def _end(gap: _Gap) -> float:
    return gap[1]


class Engine:
    """Does one thing at a time."""

    def __init__(self) -> None:
        self._gaps: list[_Gap] = [(0.0, float("inf"))]

    def take(self, ready: float, seconds: float, host: float) -> float:
        """Beginning of work that is `ready`, in the first gap that it fits into; nothing will be ready before `host`."""
        del self._gaps[: bisect_left(self._gaps, host, key=_end)]
        for at in range(bisect_left(self._gaps, ready, key=_end), len(self._gaps)):
            begin, end = self._gaps[at]
            start = max(begin, ready)
            if start + seconds <= end:
                self._gaps[at : at + 1] = [g for g in ((begin, start), (start + seconds, end)) if g[0] < g[1]]
                return start
        raise AssertionError("the last gap has no end")


@dataclass(kw_only=True)
class Timeline:
    """Times of all operations of a recording."""

    timed: list[Timed] = field(default_factory=list)
    jobs: list[tuple[int, float, float]] = field(default_factory=list)
    """Number, begin and end of the worker's jobs."""
    host_waits: list[Wait] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    """Of each step, on the training stream."""

    of_step: dict[int, list[Timed]] = field(default_factory=dict)
    """Operations that the host enqueued in each step."""

    def idle(self, begin: float, end: float) -> dict[Cause, float]:
        """Seconds in which the device computes nothing, by cause."""
        seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        for gap in self.gaps(begin, end):
            seconds[gap.cause] += gap.end - gap.begin
        return seconds

    def gaps(self, begin: float, end: float) -> list[Wait]:
        """The times in which the device computes nothing, latest part of each gap first."""
        compute = sorted((t for t in self.timed if t.operation.kind == "launch" and t.end > t.begin), key=_begin)
        gaps, free = [], begin
        for t in compute:
            if free < min(t.begin, end):
                gaps += self._explain(free, min(t.begin, end), t)
            free = max(free, t.end)
        return gaps

    def _explain(self, begin: float, end: float, last: Timed) -> list[Wait]:
        """Follows what an operation waited for back to the beginning of the idle time before it."""
        found = []
        while end > begin and last.behind is not None:
            last = last.behind
            copies = last.operation.kind != "launch"
            at = max(begin, min(end, last.ready if copies else last.begin))
            found.append(Wait(begin=at, end=end, cause="copies" if copies else "latency"))
            end = at
        for wait in reversed(self.host_waits):
            if wait.begin < end and wait.end > begin:
                found.append(Wait(begin=min(end, wait.end), end=end, cause="launches"))
                found.append(Wait(begin=max(begin, wait.begin), end=min(end, wait.end), cause=wait.cause))
                end = max(begin, wait.begin)
        found.append(Wait(begin=begin, end=end, cause="launches"))
        return [wait for wait in found if wait.end > wait.begin]


def _begin(t: Timed) -> float:
    return t.begin


def run(operations: Sequence[Operation], rates: Rates, scale: Scale) -> Timeline:
    """Gives the operations of a recording their times; those of a training alone if the others are left out."""
    timeline = Timeline()
    engines = {name: Engine() for name in _ENGINES.values()}
    # When a stream comes to what is enqueued next, and behind which operation; None: behind the host.
    streams: dict[str, Reached] = defaultdict(lambda: (0.0, None))
    events: dict[int, Reached] = {}
    copied: dict[int, float] = {}
    submitted: dict[tuple[str, int], tuple[float, float]] = {}
    host = worker = 0.0
    of_step: list[Timed] = []

    def host_waits(until: float, cause: Cause) -> None:
        nonlocal host
        if until > host:
            timeline.host_waits.append(Wait(begin=host, end=until, cause=cause))
            host = until

    for index, o in enumerate(operations):
        if o.kind in _ENGINES:
            host += rates.call_s
            reached, behind = max(streams[o.actor], (host, None), key=_time)
            seconds = scale.seconds(o, rates)
            begin = engines[_ENGINES[o.kind]].take(reached, seconds, host)
            t = Timed(operation=o, ready=reached, begin=begin, end=begin + seconds, behind=behind)
            timeline.timed.append(t)
            of_step.append(t)
            copied[index] = t.end
            streams[o.actor] = max(begin + rates.launch_s, t.end), t
        elif o.kind == HOST:
            host += rates.call_s
        elif o.kind == "record":
            events[o.event] = max(streams[o.actor], (host, None), key=_time)
        elif o.kind == "wait":
            streams[o.actor] = max(streams[o.actor], events.get(o.event, (0.0, None)), key=_time)
        elif o.kind == "host wait":
            until, behind = events[o.event] if o.event else max(streams.values(), key=_time)
            host_waits(until, "latency" if behind is None or behind.operation.kind == "launch" else "copies")
        elif o.kind == "submit":
            submitted[o.name, o.event] = host, copied.get(o.after, 0.0)
        elif o.kind == "replay":
            at, word = submitted.pop((o.name, o.event))
            begin = max(at, word, worker)
            worker = begin + scale.seconds(o, rates)
            timeline.jobs.append((o.event, begin, worker))
            if begin == word:
                host_waits(begin, "copies")
            host_waits(worker, "worker")
        elif o.kind == "step":
            timeline.ends[o.event] = streams[MAIN][0]
            timeline.of_step[o.event], of_step = of_step, []
    return timeline


def _time(reached: Reached) -> float:
    return reached[0]


def lane_of(o: Operation, *, in_backward: bool) -> Lane:
    """Row of the timeline."""
    if o.kind == "d2h":
        return "d2h copies"
    if o.kind == "h2d":
        return "h2d copies"
    if o.place == "strategy.training_step":
        return "forward"
    if o.name in ("provisional_update_", "factored_step_"):
        return "provisional update"
    return "backward" if in_backward else "exact step"


def end_of_backward(of_step: Sequence[Timed]) -> float:
    """End of the model's own part of a step's backward pass."""
    return max(t.end for t in of_step if t.operation.place == "strategy.backward")


def traces(timeline: Timeline, steps: Sequence[int]) -> list[StepTrace]:
    """The steps as `monitor.timeline.chrome_trace` takes them."""
    found = []
    for step in steps:
        begin, end = timeline.ends[step - 1], timeline.ends[step]
        of_step = timeline.of_step[step]
        backward = max(i for i, t in enumerate(of_step) if t.operation.place == "strategy.backward")
        spans = [
            _span(lane_of(t.operation, in_backward=i <= backward or t.operation.actor != MAIN), t.begin, t.end)
            for i, t in enumerate(of_step)
            if t.end > t.begin
        ]
        spans += [_span("waits of the device", w.begin, w.end, w.cause) for w in timeline.gaps(begin, end)]
        spans += [
            _span("waits of the training thread", w.begin, w.end, w.cause)
            for w in timeline.host_waits
            if begin <= w.begin < end
        ]
        spans += [_span("worker", b, e, f"job {job}", waits=False) for job, b, e in timeline.jobs if begin <= b < end]
        trace = StepTrace(step=step, begin_ns=round(1e9 * begin), end_ns=round(1e9 * end))
        trace.host_spans = _united(spans)
        found.append(trace)
    return found


def _span(lane: Lane, begin: float, end: float, name: str = "", *, waits: bool | None = None) -> Span:
    is_wait = bool(name) if waits is None else waits
    return Span(lane=lane, name=name or lane, begin_ns=round(1e9 * begin), end_ns=round(1e9 * end), waits=is_wait)


def _united(spans: Sequence[Span]) -> list[Span]:
    """Joins neighbours of one lane and name."""
    joined: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin_ns):
        of_name = joined[span.lane, span.name]
        if of_name and span.begin_ns - of_name[-1].end_ns < _UNITED_NS:
            last = of_name.pop()
            end_ns = max(last.end_ns, span.end_ns)
            span = Span(lane=span.lane, name=span.name, begin_ns=last.begin_ns, end_ns=end_ns, waits=span.waits)
        of_name.append(span)
    return [span for of_name in joined.values() for span in of_name]


def models_only(operations: Sequence[Operation]) -> list[Operation]:
    """A recording's forward and backward alone, without any optimizer."""
    return [o for o in operations if o.kind == "step" or is_models(o)]
