"""An interrupt at a chosen line of the package, as Ctrl-C may come."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning_zenflow

_PACKAGE = str(Path(lightning_zenflow.__file__).parent)

Place = tuple[str, int, str]
"""File, line, and whether the line begins ("line") or a function returns from it ("return")."""


class Interrupt:
    """Context that counts how often each place of the package is passed, and that `KeyboardInterrupt` ends, which the package raises then.

    Args:
        place: that raises it; None: none does.
        time: of those that it is passed, counted from 1.
    """

    def __init__(self, place: Place | None = None, time: int = 0) -> None:
        self.counts: Counter[Place] = Counter()
        self._at = place, time
        self._raised = False

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        sys.settrace(self._before)
        return self._raised and kind is KeyboardInterrupt

    def times(self, *, stride: int) -> list[tuple[Place, int]]:
        """Every stride'th of the places, each for the first, the second and the last time that it is passed."""
        every = [(place, time) for place, n in sorted(self.counts.items()) for time in sorted({1, min(2, n), n})]
        return every[stride // 2 :: stride]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event in ("line", "return"):
            place = frame.f_code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno, event
            self.counts[place] += 1
            if not self._raised and (place, self.counts[place]) == self._at:
                self._raised = True
                raise KeyboardInterrupt
        return self._trace
