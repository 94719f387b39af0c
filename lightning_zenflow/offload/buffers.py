"""Gradient slots, memory of the arena that goes back and forth between the training thread and the worker; and the way of new weights into
the model, from publish buffers or where the worker writes them.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import PAGE_BYTES, Event, SideStream, runtime_of
from lightning_zenflow.core.partition import Partition, Slice, build_partition, merge_ranges
from lightning_zenflow.core.schedule import StaggeredSchedule
from lightning_zenflow.offload.rank_state import Block, RankState
from lightning_zenflow.worker.arena import Arena

MAX_VIEWS = 1 << 16
"""Of tiles in slots that are kept, some 50 MB: long windows of large models have more of them."""


class SlotPool:
    """Owner of the arena's gradient slots: host memory for one gradient of one block.

    A slot belongs to the training thread from `acquire` until the job that applies its gradient is submitted, then to the worker, and is
    free again when the job is done. The slot freed last is taken first, so that a schedule touches no more memory than it needs.

    `free` is called within `RankState.records`, together with the callers' own changes.

    Attributes:
        n_slots: slots in use at most.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self.n_slots = 0
        self._free: list[int] = []
        self._views: dict[tuple[int, int], Tensor] = {}

    @property
    def n_free(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        with self._rank.records:
            self._free[:0] = reversed(range(self.n_slots, n_slots))
            self.n_slots = max(self.n_slots, n_slots)

    def acquire(self, block: Block) -> None:
        """Takes a free slot, of which there must be one, for a block's gradient of the present or next step."""
        with self._rank.records:
            block.slot = self._free.pop()

    def check_integrity(self, acquired: Iterable[int]) -> None:
        """Asserts that all slots but those that blocks have acquired are free, each once."""
        assert sorted([*acquired, *self._free]) == list(range(self.n_slots)), "each slot has one owner"

    def free(self, slots: Sequence[int]) -> None:
        """Takes back slots whose gradients have been applied or dropped."""
        self._free.extend(slots)

    def view(self, tile_index: int) -> Tensor:
        """Destination of a tile's gradient in the slot that its block has acquired.

        Args:
            tile_index: index into `Partition.tiles`.

        Returns:
            [rows, width], model dtype, host memory (page-locked for a CUDA device); to be written in stream order.
        """
        # Views are cached: every step asks for as many as there are tiles, and a new one takes six times as long.
        block = self._rank.blocks.of_tile[tile_index]
        assert block.slot is not None, "`acquire` comes before"
        slot = block.slot
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = self._rank.partition.tiles[tile_index]
            slots = self._rank.arena.slots
            first = slots.storage_offset() + slot * slots.stride(0) + tile.begin - block.begin
            view = slots.as_strided((tile.rows, tile.width), (tile.width, 1), first)
            if len(self._views) < MAX_VIEWS:
                self._views[tile_index, slot] = view
        return view

    def views_of_slice(self, slice_index: int) -> list[tuple[int, Tensor]]:
        """Destinations of a slice's gradient: for each tile its first element in the slice, and its part of the slot, flat."""
        partition = self._rank.partition
        begin = partition.slices[slice_index].begin
        return [
            (partition.tiles[tile].begin - begin, self.view(tile).view(-1))
            for tile in partition.tiles_by_slice[slice_index]
        ]


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
        self.set_ranges(rank.partition)

    @staticmethod
    def cut_partition(
        slices: Sequence[Slice], partition_sizes: Sequence[int], n_blocks: int, dtype: torch.dtype
    ) -> Partition:
        """The partition; arguments as `build_partition`, and the weights' type."""
        return build_partition(slices, partition_sizes, n_blocks)

    @staticmethod
    def n_buffers(schedule: StaggeredSchedule) -> int:
        """Publish buffers in use at most, with the one that is `scratch`."""
        return schedule.n_publish_buffers

    @staticmethod
    def place_weights(weights: Sequence[Tensor], partition: Partition, arena: Arena) -> Sequence[Tensor]:
        """Where the model's weights are from now on, like `weights`; without their values if that is elsewhere (`fill_weights`)."""
        return weights

    def fill_weights(self) -> None:
        """Fills the result of `place_weights` from the master weights, if it is other memory; once its memory has been reserved."""

    def buffer_for(self, block: Block, free: Collection[int]) -> int | None:
        """Buffer of a block's next job, one of those that are free; None: none of them."""
        return next(iter(free), None)

    def wait_for_readers(self) -> None:
        """Waits until the worker may write to free buffers without a word of the device that orders it behind their readers."""

    def set_ranges(self, partition: Partition) -> None:
        """Publishes the ranges of this partition from now on. It differs from `RankState.partition` in its ranges only."""
        for block in self._rank.blocks:
            block.published.clear()
            for r in (r for r in partition.ranges if r.begin < block.end and block.begin < r.end):
                for tile in (partition.tiles[index] for index in block.tiles):
                    begin, end = max(r.begin, tile.begin), min(r.end, tile.end)
                    if begin < end:
                        part = dataclasses.replace(r, begin=begin, end=end)
                        block.published.setdefault(tile.slice, []).append(part)

    def copy_behind(self, event: Event, block: Block, buffer: int, slices: Iterable[int]) -> None:
        """Copies the new weights of some slices from a block's buffer on the stream of the copies.

        Args:
            event: from which on no kernel of the step reads or updates these weights.
            block: a block.
            buffer: publish buffer of the block's job.
            slices: of `Block.published`.
        """
        with self._copies.behind(event):
            self._copy(block, buffer, slices)

    def copied(self) -> Event:
        """An event behind all copies of `copy_behind`."""
        return self._copies.record_event()

    def finish_copies(self, block: Block, buffer: int, rest: Iterable[int], *, joins: bool) -> None:
        """Copies the slices that `copy_behind` has left, and orders the current stream behind all of the block's copies.

        Args:
            block: a block.
            buffer: publish buffer of the block's job. It may be reused afterwards, in the order of the current stream.
            rest: slices that are left.
            joins: whether `copy_behind` has copied any.
        """
        if joins:
            self._copies.join()
        self._copy(block, buffer, rest)

    def _copy(self, block: Block, buffer: int, slices: Iterable[int]) -> None:
        new_weights = self._rank.arena.publish[buffer]
        targets, sources, numel = [], [], 0
        for r in merge_ranges(r for index in sorted(slices) for r in block.published[index]):
            targets.append(self._rank.weights_at(r.param_group, r.begin, r.numel))
            sources.append(new_weights.narrow(0, r.begin - block.begin, r.numel))
            numel += r.numel
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._rank.telemetry.h2d_bytes += numel * new_weights.element_size()


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
        self.scratch = len(rank.blocks)

    @staticmethod
    @override
    def cut_partition(
        slices: Sequence[Slice], partition_sizes: Sequence[int], n_blocks: int, dtype: torch.dtype
    ) -> Partition:
        # Of whole memory pages, as buffers are, so that there is nothing between two of them.
        return build_partition(slices, partition_sizes, n_blocks, multiple=PAGE_BYTES // dtype.itemsize)

    @staticmethod
    @override
    def n_buffers(schedule: StaggeredSchedule) -> int:
        return schedule.n_blocks + schedule.in_backward

    @staticmethod
    @override
    def place_weights(weights: Sequence[Tensor], partition: Partition, arena: Arena) -> Sequence[Tensor]:
        whole = arena.publish.view(-1)
        return [
            whole.narrow(0, begin, of_group.numel())
            for begin, of_group in zip(partition.group_begins, weights, strict=True)
        ]

    @override
    def fill_weights(self) -> None:
        for ours, begin in zip(self._rank.weights, self._rank.partition.group_begins, strict=True):
            ours.copy_(self._rank.arena.master.narrow(0, begin, ours.numel()))

    @override
    def buffer_for(self, block: Block, free: Collection[int]) -> int | None:
        return block.number if block.number in free else None

    @override
    def wait_for_readers(self) -> None:
        with self._rank.telemetry.measure("flush"):
            runtime_of(self._rank.device).synchronize()

    @override
    def set_ranges(self, partition: Partition) -> None:
        """Leaves nothing to copy."""
