"""Happens-before order by vector clocks (Mattern 1989): actors, their operations, and the memory that these read and write.

An actor is the host, the worker or a stream. Its clock holds, for each actor, the number of the last operation that precedes what it does
next. Two accesses to the same bytes, at least one of them a write, must be ordered; if neither precedes the other, they race.
"""

import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

HOST, WORKER, MAIN = "host", "worker", "main"

_MODEL = ("", "strategy.training_step", "strategy.backward", "strategy.optimizer_step")
"""Places of operations that are the model's own."""

Clock = dict[str, int]


def join(*clocks: Clock) -> Clock:
    """What precedes any of them precedes the result."""
    result: Clock = {}
    for clock in clocks:
        for actor, tick in clock.items():
            if tick > result.get(actor, 0):
                result[actor] = tick
    return result


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, end) of the memory that begins at `base`: an allocation, or a part of the arena."""

    base: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Access:
    """A read or write of bytes by one operation."""

    span: Span
    writes: bool
    actor: str
    tick: int
    name: str

    def precedes(self, clock: Clock) -> bool:
        """Whether an operation with this clock comes after the access."""
        return clock.get(self.actor, 0) >= self.tick

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.name} on {self.actor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of the recording, in the order in which the host came to it."""

    kind: str
    """launch, d2h, h2d: work of a stream; part: of the launch that follows (`one_launch_a_pass`); host: work of the host; record: of an
    event; host wait; step: the end of one (`step_ends`)."""
    actor: str
    name: str = ""
    n_bytes: int = 0
    """Copied."""
    event: int = 0
    """Number of the event, or of the step that ends."""
    place: str = ""
    """Function of the package that did it."""

    @property
    def is_of_the_model(self) -> bool:
        """Whether it is one of forward or backward itself."""
        return self.place in _MODEL


@dataclass
class Order:
    """Clocks of all actors, accesses to memory, and what was found."""

    clocks: defaultdict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    races: Counter[str] = field(default_factory=Counter)
    """Descriptions of pairs of accesses without order."""
    operations: list[Operation] = field(default_factory=list)
    _ticks: Counter[str] = field(default_factory=Counter)
    _accesses: defaultdict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _allocated_on: dict[int, str] = field(default_factory=dict)
    _kept_for: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    _freed: defaultdict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _host: list[tuple[int, int]] = field(default_factory=list)

    def add_host_memory(self, begin: int, end: int) -> None:
        """Memory of the host that the device or the worker reads and writes; a unit of its own."""
        insort(self._host, (begin, end))

    def remove_host_memory(self, begin: int, end: int) -> None:
        """After it was freed."""
        self._host.remove((begin, end))
        self._accesses.pop(begin, None)

    def host_base(self, address: int) -> int | None:
        """Beginning of the unit of the host's memory that an address lies in; None: it lies in none."""
        at = bisect_right(self._host, (address, math.inf)) - 1
        return self._host[at][0] if at >= 0 and address < self._host[at][1] else None

    def begin(self, actor: str) -> Clock:
        """Begins an operation of an actor; a stream's comes after what the host did before."""
        self._ticks[actor] += 1
        clock = join(self.clocks[actor], {} if actor == WORKER else self.clocks[HOST])
        clock[actor] = self._ticks[actor]
        self.clocks[actor] = clock
        for access in self._freed.pop(actor, ()):
            # The allocator gives freed memory to the next operation of the stream that it was allocated on.
            if not access.precedes(clock):
                self.races[f"{access}, but its memory is freed and reused on {actor}"] += 1
        return clock

    def follow(self, actor: str, clock: Clock) -> None:
        """Orders an actor's later operations behind a clock."""
        self.clocks[actor] = join(self.clocks[actor], clock)

    def touch(self, spans: Iterable[Span], *, writes: bool, actor: str, clock: Clock, name: str) -> None:
        """Adds accesses of the operation that has begun with `clock`."""
        for span in spans:
            kept = []
            for access in self._accesses[span.base]:
                overlaps = access.span.begin < span.end and span.begin < access.span.end
                ordered = access.precedes(clock)
                if overlaps and (writes or access.writes) and not ordered:
                    self.races[f"{access} and {'write' if writes else 'read'} by {name} on {actor}"] += 1
                covered = span.begin <= access.span.begin and access.span.end <= span.end
                if not (ordered and covered and (writes or (not access.writes and access.actor == actor))):
                    kept.append(access)
            kept.append(Access(span=span, writes=writes, actor=actor, tick=clock[actor], name=name))
            self._accesses[span.base] = kept

    def allocate(self, base: int, actor: str) -> None:
        """Notes device memory that was allocated on a stream."""
        self._allocated_on[base] = actor

    def keep_for(self, base: int, actor: str) -> None:
        """The allocator waits for a stream before it gives this memory away (`Tensor.record_stream`)."""
        self._kept_for[base].add(actor)

    def free(self, base: int) -> None:
        """Frees device memory."""
        accesses, actor = self._accesses.pop(base, []), self._allocated_on.pop(base, None)
        kept_for = self._kept_for.pop(base, set())
        if actor is not None:
            self._freed[actor] += [a for a in accesses if a.actor not in {actor, HOST, *kept_for}]
