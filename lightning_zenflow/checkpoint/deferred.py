"""Saves that are deferred, where none is possible: as by the handler of a signal, which may come at any instruction."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeferredSaves:
    """Saves that wait for the next moment at which the state is whole: before an optimizer step, at the end of a batch, or of a call that
    must not be disturbed.

    Attributes:
        in_batch: whether a batch is under way, from before its forward pass until the records of its step are complete.
        wanted: calls that save, in order.
    """

    def __init__(self) -> None:
        self._depth, self.in_batch = 0, False
        self.wanted: list[Callable[[], None]] = []

    @property
    def must_wait(self) -> bool:
        """True inside a batch or a call that must not be disturbed."""
        return self.in_batch or self._depth > 0

    def make_up(self) -> None:
        """Does the saves in `wanted`, unless they must wait longer."""
        while self.wanted and not self.must_wait:
            self.wanted.pop(0)()

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


def undisturbed(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorates a method of a strategy during which saves wait."""

    @wraps(method)
    def wrapper(strategy: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with strategy._saves.undisturbed():
            return method(strategy, *args, **kwargs)

    return wrapper
