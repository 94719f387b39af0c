"""New weights that the worker writes where the model has them: weights in host memory, of which nothing is copied."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Partition, Slice, build_partition
from lightning_zenflow.deferred.memory import Publisher
from lightning_zenflow.schedule.staggered import StaggeredSchedule
from lightning_zenflow.worker.arena import PAGE_BYTES, Arena
from lightning_zenflow.worker.rank_state import RankState


class InPlacePublisher(Publisher):
    """The publish buffers are the weights: block b always publishes to buffer b, one behind the other; the buffer behind them is scratch.

    With S = 1, d = 0 only (`ZenFlowConfig.with_weights_on_host`): a step reads weights when their jobs of the step before are published
    (`JobsInFlight.publish_blocks`). Layers whose gradients come last in backward are fetched first in the next forward pass. So the newest
    job is the most urgent one, and each is in time if the work fits into backward and forward.

    A job owns its block's weights from its submission until *done*, and writes them while backward may still be running: its word is behind
    the gradients of all slices of the block, and these are behind the step's last reads of their weights, by kernels or by copies to the
    device that kernels wait for. A copy that nothing waits for may read a mixture. In a flush the word was written before the job is
    submitted, so the training thread waits for the device.
    """

    in_place = True

    def __init__(self, rank: RankState) -> None:
        super().__init__(rank)
        self.scratch = len(rank.partition.blocks)

    @staticmethod
    @override
    def cut(slices: Sequence[Slice], partition_sizes: Sequence[int], n_blocks: int, dtype: torch.dtype) -> Partition:
        # Of whole memory pages, as buffers are, so that there is nothing between two of them.
        return build_partition(slices, partition_sizes, n_blocks, multiple=PAGE_BYTES // dtype.itemsize)

    @staticmethod
    @override
    def n_buffers(schedule: StaggeredSchedule) -> int:
        return schedule.n_blocks + schedule.in_backward

    @staticmethod
    @override
    def place(weights: Sequence[Tensor], partition: Partition, arena: Arena) -> Sequence[Tensor]:
        whole = arena.publish.view(-1)
        return [
            whole.narrow(0, begin, of_group.numel())
            for begin, of_group in zip(partition.group_begins, weights, strict=True)
        ]

    @override
    def take_over(self) -> None:
        for ours, begin in zip(self._rank.weights, self._rank.partition.group_begins, strict=True):
            ours.copy_(self._rank.arena.master.narrow(0, begin, ours.numel()))

    @override
    def buffer_for(self, block: int, free: Collection[int]) -> int | None:
        return block if block in free else None

    @override
    def wait_for_readers(self) -> None:
        with self._rank.telemetry.stalls.measure("flush"):
            runtime_of(self._rank.device).synchronize()

    @override
    def use(self, partition: Partition) -> None:
        """Leaves nothing to copy."""
        self._ranges = [{} for _ in partition.blocks]
