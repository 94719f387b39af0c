"""Saves that must wait until the state is whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Saves:
    """Saves of one run of a Trainer. Where none is possible, as by the handler of a signal, which may come at any instruction, they wait
    for the end of the batch, or of a call that must not be disturbed.

    Attributes:
        in_batch: whether a batch is under way, from before its forward pass until the records of its step are complete.
        is_missing: whether the last save is not complete, because it waits or has failed: what it replaces must stay.
        over: whether callbacks have been called for the end of the training.
    """

    def __init__(self) -> None:
        self.in_batch = self.is_missing = self.over = False
        self._depth, self._makes_up = 0, False
        self._waiting: list[Callable[[], None]] = []

    @property
    def must_wait(self) -> bool:
        """True inside a batch or a call that must not be disturbed."""
        return self.in_batch or self._depth > 0

    def wait(self, save: Callable[[], None]) -> None:
        """Has a call that saves, or that depends on a save, wait behind those that wait already."""
        self._waiting.append(save)

    def _make_up(self) -> None:
        """Does what waits, one behind the other, unless it must wait longer."""
        if not self._makes_up:
            try:
                self._makes_up = True
                while self._waiting and not self.must_wait:
                    self._waiting.pop(0)()
            finally:
                self._makes_up = False

    def end_batch(self) -> None:
        """Ends the batch that is under way, and after an exception whatever else was."""
        self.in_batch, self._depth = False, 0
        self._make_up()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context in which saves wait until its end; after an exception longer, until `end_batch`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._make_up()
