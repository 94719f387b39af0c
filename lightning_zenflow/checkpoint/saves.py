"""Saves that must wait until the state is whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Saves:
    """Saves of one training. Where none is possible, as by the handler of a signal, which may come at any instruction, they wait for the
    end of the batch, or of a call that must not be disturbed.

    Attributes:
        in_batch: whether a batch is under way, from before its forward pass until the records of its step are complete.
        wanted: calls that save, in order.
        is_missing: whether the last save has to wait, or has failed where its caller goes on: what it replaces must stay.
        makes_up: whether those that had to wait are being done.
        over: whether callbacks have been called for the end of the training.
    """

    def __init__(self) -> None:
        self._depth, self.in_batch, self.makes_up = 0, False, False
        self.wanted: list[Callable[[], None]] = []
        self.is_missing = self.over = False

    @property
    def must_wait(self) -> bool:
        """True inside a batch or a call that must not be disturbed."""
        return self.in_batch or self._depth > 0

    def make_up(self) -> None:
        """Does the saves in `wanted`, one behind the other, unless they must wait longer."""
        if not self.makes_up:
            try:
                self.makes_up = True
                while self.wanted and not self.must_wait:
                    self.wanted.pop(0)()
            finally:
                self.makes_up = False

    def end_batch(self) -> None:
        """Ends the batch that is under way, and after an exception whatever else was."""
        self.in_batch, self._depth = False, 0
        self.make_up()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context in which saves wait until its end; after an exception longer, until `end_batch`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self.make_up()
