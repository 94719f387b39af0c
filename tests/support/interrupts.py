"""An interrupt at a chosen line of the package, as Ctrl-C may come."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import lightning_zenflow
from lightning_zenflow.offload.rank_state import Transaction

_PACKAGE = str(Path(lightning_zenflow.__file__).parent)

Place = tuple[str, int, str]
"""File, line, and whether the line begins ("line") or a function returns from it ("return")."""
MOST_LOST = 0.2
"""Share of all places at which the state may be lost, those of changes of records, during which nothing waits: docs/reliability.md."""


@functools.cache
def _lines(code: CodeType) -> frozenset[int | None]:
    return frozenset(line for *_, line in code.co_lines())


class Interrupt:
    """Context that counts how often each place of the package is passed, and that `KeyboardInterrupt` ends, which the package raises then.

    Args:
        place: that raises it, and is counted alone; None: none does, and all are counted.
        time: of those that it is passed, counted from 1.
    """

    def __init__(self, place: Place | None = None, time: int = 0) -> None:
        self.counts: Counter[Place] = Counter()
        self._place, self._time = place, time
        self._raised = False
        self.records: Transaction | None = None
        """Of what is interrupted, whose exact state is lost where a change of them is cut, and nowhere else."""
        self.cuts: set[tuple[Place, int]] = set()
        """Places, and which time, at which they are under change."""

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        sys.settrace(self._before)
        return self._raised and kind is KeyboardInterrupt

    @property
    def cut_records(self) -> bool:
        return (self._place, self._time) in self.cuts

    def times(self, *, stride: int) -> list[tuple[Place, int]]:
        """Every stride'th of the places, each for the first, the second and the last time that it is passed."""
        every = [(place, time) for place, n in sorted(self.counts.items()) for time in sorted({1, min(2, n), n})]
        return every[stride // 2 :: stride]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and not self._traces(frame.f_code):
            return None
        place = frame.f_code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno, event
        if event in ("line", "return") and self._place in (None, place):
            self.counts[place] += 1
            if self.records is not None and self.records.is_broken:
                self.cuts.add((place, self.counts[place]))
            if place == self._place and self.counts[place] == self._time:
                self._raised = True
                raise KeyboardInterrupt
        return self._trace

    def _traces(self, code: CodeType) -> bool:
        """Tracing every line of a step takes as long as the step."""
        if not code.co_filename.startswith(_PACKAGE):
            return False
        return self._place is None or (code.co_filename.endswith(self._place[0]) and self._place[1] in _lines(code))


def sweep(outcome_of: Callable[[Interrupt], str], *, stride: int) -> int:
    """Interrupts runs at every stride'th place that one passes, each at one time; how many. Where no records are cut the state is whole."""
    passed, counts = Interrupt(), Counter[str]()
    assert outcome_of(passed) == "whole"
    for place, time in passed.times(stride=stride):
        context = Interrupt(place, time)
        try:
            outcome = outcome_of(context)
            assert outcome == ("lost" if context.cut_records else "whole")
        except Exception as error:
            raise AssertionError(f"interrupted at {place}, time {time}") from error
        counts[outcome] += 1
    places = passed.times(stride=1)
    share = len(passed.cuts.intersection(places)) / len(places)
    print(f"lost at {share:.1%} of {len(places)} places; of those tried: {counts}")
    assert stride > 1 or share < MOST_LOST
    return counts.total()


def strides(fast: int, slow: int) -> pytest.MarkDecorator:
    """Of which places every stride'th is tried."""
    thorough = pytest.param(slow, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("stride", [fast, thorough])
