"""Saves that must wait until the state is whole, and the links that lead to what they write."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Saves:
    """Saves of one training. Where none is possible, as by the handler of a signal, which may come at any instruction, they wait for the
    next moment at which the state is whole: before an optimizer step, at the end of a batch, or of a call that must not be disturbed.

    Attributes:
        in_batch: whether a batch is under way, from before its forward pass until the records of its step are complete.
        wanted: calls that save, in order.
        is_missing: whether the last save has to wait, or has failed where its caller goes on: what it replaces must stay.
        makes_up: whether those that had to wait are being done.
        over: whether callbacks have been called for the end of the training.
        linking: `ModelCheckpoint`s whose link leads to the last checkpoint, also if that waits or has failed.
    """

    def __init__(self) -> None:
        self._depth, self.in_batch, self.makes_up = 0, False, False
        self.wanted: list[Callable[[], None]] = []
        self.is_missing = self.over = False
        self.linking: list[Any] = []
        self._targets: dict[str, str] = {}

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

    def note_links(self) -> None:
        """Before a save."""
        links = (callback.last_model_path for callback in self.linking)
        self._targets |= {link: os.readlink(link) for link in links if os.path.islink(link) and os.path.exists(link)}

    def put_links_back(self) -> None:
        """Has links lead to the checkpoint before the one that was not written."""
        for link, target in self._targets.items():
            if not os.path.exists(link) and os.path.exists(os.path.join(os.path.dirname(link), target)):
                with suppress(OSError):  # training ends with an error of its own
                    os.symlink(target, f"{link}.new")
                    os.replace(f"{link}.new", link)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context in which saves wait until its end; after an exception longer, until `end_batch`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self.make_up()
