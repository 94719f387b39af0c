"""An interrupt at a chosen line of the package, as Ctrl-C may come."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import lightning_zenflow

_PACKAGE = str(Path(lightning_zenflow.__file__).parent)


class Place(NamedTuple):
    """A line of the package that begins, or a return from it."""

    file: str
    line: int
    event: str


class PassedPlaces:
    """Context that counts how often each place is passed."""

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()

    def __enter__(self) -> "PassedPlaces":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> bool | None:
        sys.settrace(self._before)
        return None

    def times(self, *, stride: int) -> list[tuple[Place, int]]:
        """Every stride'th of the places, each for the first, the second and the last time that it is passed."""
        every = [(place, time) for place, n in sorted(self.counts.items()) for time in sorted({1, min(2, n), n})]
        return every[stride // 2 :: stride]

    def _passed(self, place: Place) -> None:
        self.counts[place] += 1

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event in ("line", "return"):
            self._passed(Place(frame.f_code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno, event))
        return self._trace


class Interrupt(PassedPlaces):
    """Context that `KeyboardInterrupt` ends, which the package raises the n-th time that a place is passed."""

    def __init__(self, place: Place, time: int) -> None:
        super().__init__()
        self._at = place, time
        self._raised = False

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> bool:
        super().__exit__(kind, error, traceback)
        return self._raised and kind is KeyboardInterrupt

    def _passed(self, place: Place) -> None:
        super()._passed(place)
        if not self._raised and (place, self.counts[place]) == self._at:
            self._raised = True
            raise KeyboardInterrupt
