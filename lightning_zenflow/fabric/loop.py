"""Inputs of the user's loop to the strategy: the last micro-batch of a step, and the norm to clip to."""

import math
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch.nn import Module
from typing_extensions import override


# Private: Lightning's base class of what `fabric.no_backward_sync` calls; strategies have no other way to provide it.
class MicroBatches(_BackwardSyncControl):
    """State of `fabric.no_backward_sync`: whether the step has further micro-batches.

    ZeRO-2 reduces the gradients of every micro-batch all the same, because each rank keeps its part only.
    """

    def __init__(self) -> None:
        self.more_to_come = False

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return self._under_way() if enabled else nullcontext()

    @contextmanager
    def _under_way(self) -> Generator[None]:
        before, self.more_to_come = self.more_to_come, True
        try:
            yield
        finally:
            self.more_to_come = before


class MaxNorm:
    """The norm that steps are clipped to. A loop says it after the backward pass, in which blocks have been submitted already.

    Args:
        of_config: DeepSpeed's `gradient_clipping`, of steps without a call of `fabric.clip_gradients`; 0: no clipping.
    """

    def __init__(self, of_config: float = 0.0) -> None:
        self._of_config = of_config
        self._given: float | None = None

    @property
    def expected(self) -> float:
        """For the first step: infinity where nothing is known, so that no block is submitted before its factor is known."""
        return self._of_config or math.inf

    def give(self, max_norm: float) -> None:
        """Sets the norm of the present step."""
        self._given = max_norm

    def take(self) -> float:
        """The norm of the present step, which ends."""
        given, self._given = self._given, None
        return self._of_config if given is None else given
