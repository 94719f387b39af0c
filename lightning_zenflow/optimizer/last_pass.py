"""Which backward pass of a step is its last one: the sign for updates to begin."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_warn

_SILENT_STEPS = 50
"""Steps in a row in which nothing hides, before a warning."""


class LastPass:
    """Which backward pass of a step is its last, as far as that is known when the pass begins.

    Attributes:
        learned: backward passes of a step; 0: those inside a closure are the last ones; None: not known yet.
        is_accumulating: whether the user has said that the pass is not the last.
    """

    def __init__(self, given: int | None) -> None:
        self.learned = given
        self.is_accumulating = self._is_in_closure = False
        self._n_silent = 0

    @contextmanager
    def in_closure(self) -> Iterator[None]:
        """Context of a step's closure."""
        self._is_in_closure = True
        try:
            yield
        finally:
            self._is_in_closure = False

    def is_last(self, number: int) -> bool:
        """Whether the backward pass that begins, the `number`-th of its step, is the last."""
        if self.is_accumulating:
            return False
        return self._is_in_closure or bool(self.learned and number >= self.learned)

    def end_step(self, n_passes: int, *, in_closure: bool, was_known: bool) -> None:
        """Learns from a step, and warns where nothing hides."""
        if self.learned is None:
            self.learned = 0 if in_closure else n_passes
            return
        self._n_silent = 0 if was_known else self._n_silent + 1
        if self._n_silent == _SILENT_STEPS:
            rank_zero_warn(
                f"OffloadAdamW: in {_SILENT_STEPS} steps no backward pass was known to be the last one of its step, so that no update was"
                f" hidden: set accumulation_steps to the number of backward passes, which is {n_passes} now and was {self.learned} in the"
                " first step"
            )
