"""Objects of one rank that every part of an optimizer step works on, and changes of its records that no exception cuts unnoticed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from lightning_zenflow.core.device import SideStream
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.telemetry.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena


class Transaction:
    """Context of a change of several records. A change that an exception cuts is broken until `repaired`.

    `KeyboardInterrupt` and the exceptions of other signal handlers may be raised between any two instructions. Records that belong together
    are changed in one short context, and nothing waits in it. Outside of the context the records agree, whatever is raised there.
    """

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_broken(self) -> bool:
        """Whether an exception has cut a change; to be asked outside of the context."""
        return self._depth > 0

    def repaired(self) -> None:
        """Notes that the records agree again."""
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._depth -= 1


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The model's weights, the optimizer state and the tools of one data-parallel rank.

    The record itself never changes. Ownership of the memory behind `arena` is defined in ``protocol.h``; `weights` on the device belong to
    the training thread, in the order of the device's streams.
    """

    partition: Partition
    """Layout of the rank's optimizer state and its division into blocks."""
    arena: Arena
    """Shared memory: exact state, gradient slots and publish buffers."""
    weights: Sequence[Tensor]
    """For each parameter group the rank's flat partition of the model's weights, model dtype; on the device, or in place: views of
    `Arena.publish`, which `Arena.close` frees."""
    device: torch.device
    """Training device: of gradients and of what is computed from them."""
    kernels: Kernels
    """Passes over gradients and device-owned entries."""
    telemetry: Telemetry
    """Stall clock and copied bytes."""
    d2h: SideStream
    """Stream on which gradients, factors and sequence numbers are copied to the arena."""
    records: Transaction = field(default_factory=Transaction)
    """Entered where records of slots, windows, jobs and publish buffers change together. If a change is cut, the exact state is lost."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and gradients."""
        return self.weights[0].dtype

    def forget_weights(self) -> None:
        """Drops the memory of the weights when training has ended; the model may have others by then."""
        for weights in self.weights:
            weights.data = weights.new_empty(0)

    def weights_at(self, param_group: int, begin: int, numel: int) -> Tensor:
        """View [numel] of the model's weights.

        Args:
            param_group: parameter group of the elements.
            begin: first element, counted over the partition.
            numel: number of elements, all of the same group.
        """
        return self.weights[param_group].narrow(0, begin - self.partition.group_begins[param_group], numel)
