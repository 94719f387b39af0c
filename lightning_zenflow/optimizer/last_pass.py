"""Which backward pass of a step is its last one: the sign for updates to begin."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_warn

_SILENT_STEPS = 50
"""Steps in a row in which nothing hides, before a warning."""


class LastPass:
    """Which backward pass of a step is its last, as far as that is known when the pass begins. `n_passes`: those of a step."""

    def __init__(self, n_passes: int | None) -> None:
        # 0: those inside a closure are the last ones. None: not known yet.
        self._learned = n_passes
        self._said: bool | None = None
        self._n_silent = 0

    @contextmanager
    def saying(self, is_last: bool) -> Iterator[None]:
        """Context of backward passes that are the last ones of their steps, as those in a closure, or are not."""
        before, self._said = self._said, is_last
        try:
            yield
        finally:
            self._said = before

    def is_last(self, number: int) -> bool:
        """Whether the backward pass that begins, the `number`-th of its step, is the last."""
        return bool(self._learned and number >= self._learned) if self._said is None else self._said

    def end_step(self, n_passes: int, *, in_closure: bool, was_known: bool) -> None:
        """Learns from a step, and warns where nothing hides."""
        if self._learned is None:
            self._learned = 0 if in_closure else n_passes
            return
        self._n_silent = 0 if was_known else self._n_silent + 1
        if self._n_silent == _SILENT_STEPS:
            rank_zero_warn(
                f"OffloadAdamW: in {_SILENT_STEPS} steps no backward pass was known to be the last one of its step, so that no update was"
                f" hidden: set accumulation_steps to the number of backward passes, which is {n_passes} now and was {self._learned} in the"
                " first step"
            )
