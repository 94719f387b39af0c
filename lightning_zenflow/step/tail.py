"""Blocks of a rank from which the tail is chosen."""

from collections.abc import Sequence, Set

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import STATE_BYTES
from lightning_zenflow.step.arrivals import Arrivals
from lightning_zenflow.worker.memory import has_room
from lightning_zenflow.worker.rank_state import RankState


class TailCandidates:
    """The blocks of a rank, their order of arrival, and whether the device can own some of them entirely (`schedule.auto_control`)."""

    def __init__(self, config: ZenFlowConfig, rank: RankState, arrivals: Arrivals) -> None:
        self._tail = config.tail
        self._rank = rank
        self._arrivals = arrivals

    @property
    def n_blocks(self) -> int:
        """Blocks of the rank."""
        return self._arrivals.n_blocks

    def in_order_of_arrival(self) -> Sequence[int]:
        """Blocks in the order in which the last step's gradients were complete."""
        return self._arrivals.in_order_of_arrival()

    def device_can_own(self, blocks: Set[int]) -> bool:
        """Whether the device may and can hold the whole state of these blocks; right after a step."""
        if self._tail != "auto":
            return self._tail == "device"
        of_blocks = (self._rank.partition.blocks[block] for block in blocks)
        numel = sum(block.end - block.begin for block in of_blocks)
        # The state, and the gradient in the model's type.
        return has_room(numel * (STATE_BYTES + self._rank.dtype.itemsize), self._rank.device)
