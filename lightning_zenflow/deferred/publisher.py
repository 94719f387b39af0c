"""The way of new weights into the model: from publish buffers, or where the worker writes them."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence, Set

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import Event, SideStream, runtime_of
from lightning_zenflow.core.partition import (
    Partition,
    Range,
    Slice,
    build_partition,
    merge_ranges,
    ranges_of_block,
)
from lightning_zenflow.schedule.staggered import StaggeredSchedule
from lightning_zenflow.worker.arena import PAGE_BYTES, Arena
from lightning_zenflow.worker.rank_state import RankState


class Publisher:
    """Copies new weights of blocks from publish buffers into the model: during backward, slice by slice, or at the end of the step.

    Copies in backward run on a stream of their own, beside the gradient copies (d2h) and the kernels of backward. They are ordered behind
    an event, so a device that runs behind the host makes them in backward, even where the host enqueues them at the end of the step.

    Where the new weights lie, and what follows from it, is decided here: a buffer goes from one block's job to another's. Those of
    `InPlacePublisher` are the weights.

    Attributes:
        in_place: whether buffers are the weights. They are awaited where they are fetched, not at the end of a step, and the worker takes
            the newest job first.
        scratch: buffer of jobs whose weights are discarded, where blocks are submitted in backward; no other job uses it.
    """

    in_place = False

    def __init__(self, rank: RankState) -> None:
        self.scratch = 0
        self._rank = rank
        self._copies = SideStream(rank.device)
        self.use(rank.partition)

    @staticmethod
    def cut(slices: Sequence[Slice], partition_sizes: Sequence[int], n_blocks: int, dtype: torch.dtype) -> Partition:
        """The partition; arguments as `build_partition`, and the weights' type."""
        return build_partition(slices, partition_sizes, n_blocks)

    @staticmethod
    def n_buffers(schedule: StaggeredSchedule) -> int:
        """Publish buffers in use at most, with the one that is `scratch`."""
        return schedule.n_publish_buffers

    @staticmethod
    def place(weights: Sequence[Tensor], partition: Partition, arena: Arena) -> Sequence[Tensor]:
        """Where the model's weights are from now on, like `weights`; without their values if that is elsewhere (`take_over`)."""
        return weights

    def take_over(self) -> None:
        """Fills the result of `place` from the master weights, if it is other memory; once its memory has been reserved."""

    def buffer_for(self, block: int, free: Collection[int]) -> int | None:
        """Buffer of a block's next job, one of those that are free; None: none of them."""
        return next(iter(free), None)

    def wait_for_readers(self) -> None:
        """Waits until the worker may write to free buffers without a word of the device that orders it behind their readers."""

    def use(self, partition: Partition) -> None:
        """Publishes the ranges of this partition from now on. It differs from `RankState.partition` in its ranges only."""
        # For each block its trained ranges by slice, divided at tiles.
        self._ranges: list[dict[int, list[Range]]] = [{} for _ in partition.blocks]
        for number, block in enumerate(partition.blocks):
            for r in ranges_of_block(partition, block):
                for tile in (partition.tiles[index] for index in block.tiles):
                    begin, end = max(r.begin, tile.begin), min(r.end, tile.end)
                    if begin < end:
                        part = dataclasses.replace(r, begin=begin, end=end)
                        self._ranges[number].setdefault(tile.slice, []).append(part)

    def trained_slices(self, block: int) -> Set[int]:
        """Slices that have a trained part in a block."""
        return self._ranges[block].keys()

    def copy_behind(self, event: Event, block: int, buffer: int, slices: Iterable[int]) -> None:
        """Copies the new weights of some slices from a block's buffer on the stream of the copies.

        Args:
            event: from which on no kernel of the step reads or updates these weights.
            block: index into `Partition.blocks`.
            buffer: publish buffer of the block's job.
            slices: of `trained_slices`.
        """
        with self._copies.behind(event):
            self._copy(block, buffer, slices)

    def copied(self) -> Event:
        """An event behind all copies of `copy_behind`."""
        return self._copies.record_event()

    def finish(self, block: int, buffer: int, rest: Iterable[int], *, joins: bool) -> None:
        """Copies the slices that `copy_behind` has left, and orders the current stream behind all of the block's copies.

        Args:
            block: index into `Partition.blocks`.
            buffer: publish buffer of the block's job. It may be reused afterwards, in the order of the current stream.
            rest: slices that are left.
            joins: whether `copy_behind` has copied any.
        """
        if joins:
            self._copies.join()
        self._copy(block, buffer, rest)

    def _copy(self, block: int, buffer: int, slices: Iterable[int]) -> None:
        first = self._rank.partition.blocks[block].begin
        new_weights = self._rank.arena.publish[buffer]
        targets, sources, numel = [], [], 0
        for r in merge_ranges(r for index in sorted(slices) for r in self._ranges[block][index]):
            targets.append(self._rank.weights_at(r.param_group, r.begin, r.numel))
            sources.append(new_weights.narrow(0, r.begin - first, r.numel))
            numel += r.numel
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._rank.telemetry.traffic.h2d_bytes += numel * new_weights.element_size()


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
