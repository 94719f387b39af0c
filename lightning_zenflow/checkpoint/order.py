"""The optimizer's state in DeepSpeed's order, as its engine saves it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer


class DeepSpeedsOrder:
    """The order of one save.

    Args:
        optimizer: whose state is saved; None: only weights are.
    """

    def __init__(self, optimizer: ZenFlowOptimizer | None) -> None:
        self._optimizer = optimizer
        self._copies: Any = None

    def reserve(self, disk: DiskCopies) -> None:
        """Takes the disk space that the order needs, or raises OSError; the next step is `gathered`."""
        if self._optimizer is not None:
            self._copies = self._optimizer.copy_for_save(disk)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which DeepSpeed's code finds the exact state in its order. All ranks enter and leave it together; what stays gathered
        under stage 3 is gathered again at the end.
        """
        with nullcontext() if self._optimizer is None else self._optimizer.saved_as(self._copies):
            yield


def gather_again(optimizer: ZenFlowOptimizer | None) -> None:
    """Gathers what stays gathered under stage 3, when something else has dropped it. A collective."""
    with DeepSpeedsOrder(optimizer).gathered():
        pass
