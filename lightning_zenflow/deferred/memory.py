"""Memory of the arena that goes back and forth between the training thread and the worker, and the way of new weights into the model."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence, Set

import torch
from torch import Tensor

from lightning_zenflow.core.device import Event, SideStream
from lightning_zenflow.core.partition import Partition, Range, merge_ranges, ranges_of_block
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.rank_state import RankState, UnderWay


class SlotPool:
    """Owner of the arena's gradient slots: host memory for one gradient of one block.

    A slot belongs to the training thread from `acquire` until the job that applies its gradient is submitted, then to the worker, and is
    free again when the job is done. The slot freed last is taken first, so that a schedule touches no more memory than it needs.

    Args:
        books: see `RankState`. Entered by the callers of all methods that change more than one record with theirs.
    """

    def __init__(self, partition: Partition, arena: Arena, books: UnderWay) -> None:
        self._partition = partition
        self._arena = arena
        self._books = books
        self._n_slots = 0
        self._free: list[int] = []
        self._of_step: dict[int, int] = {}  # for each block that has acquired one, the slot of the present or next step
        self._views: dict[tuple[int, int], Tensor] = {}

    @property
    def n_slots(self) -> int:
        """Slots in use at most."""
        return self._n_slots

    @property
    def n_free(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        with self._books:
            self._free[:0] = reversed(range(self._n_slots, n_slots))
            self._n_slots = max(self._n_slots, n_slots)

    def has_acquired(self, block: int) -> bool:
        """Whether a block has a slot for the present or next step."""
        return block in self._of_step

    def acquire(self, block: int) -> None:
        """Takes a free slot, of which there must be one, for a block's gradient of the present or next step."""
        with self._books:
            self._of_step[block] = self._free.pop()

    def of_block(self, block: int) -> int:
        """The slot that a block has acquired."""
        return self._of_step[block]

    def end_step(self) -> None:
        """Ends phase *fill*: all slots of the step belong to windows."""
        self._of_step.clear()

    def drop_step(self, *, in_windows: Collection[int]) -> list[int]:
        """Ends a step that was interrupted in phase *fill*; returns its slots but for those of the blocks `in_windows`."""
        dropped = [slot for block, slot in self._of_step.items() if block not in in_windows]
        self._of_step.clear()
        return dropped

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
        # Views are cached: every step asks for as many as there are tiles.
        block = self._partition.block_of_tile[tile_index]
        slot = self._of_step[block]
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = self._partition.tiles[tile_index]
            whole = self._arena.slots[slot].narrow(0, tile.begin - self._partition.blocks[block].begin, tile.numel)
            view = self._views[tile_index, slot] = whole.view(tile.rows, tile.width)
        return view

    def views_of_slice(self, slice_index: int) -> list[tuple[int, Tensor]]:
        """Destinations of a slice's gradient: for each tile its first element in the slice, and its part of the slot, flat."""
        begin = self._partition.slices[slice_index].begin
        return [
            (self._partition.tiles[tile].begin - begin, self.view(tile).view(-1))
            for tile in self._partition.tiles_by_slice[slice_index]
        ]


SCRATCH_BUFFER = 0
"""Output of jobs whose weights are discarded, where blocks are submitted in backward; no other job uses it."""


class PublishBuffers:
    """Owner of the publish buffers that no job uses, each with the event behind the device's last copies from it.

    Args:
        has_scratch: whether `SCRATCH_BUFFER` is set aside.
    """

    def __init__(self, *, has_scratch: bool) -> None:
        self._n_buffers = SCRATCH_BUFFER + 1 if has_scratch else 0
        # None instead of an event: the last sealed word is ordered behind the copies.
        self._free: dict[int, Event | None] = {}

    @property
    def n_free(self) -> int:
        """Buffers that can be taken."""
        return len(self._free)

    def grow(self, n_buffers: int) -> None:
        """Allows jobs to use the first `n_buffers` buffers of the arena."""
        self._free.update(dict.fromkeys(range(self._n_buffers, n_buffers)))
        self._n_buffers = max(self._n_buffers, n_buffers)

    def next(self) -> tuple[int, Event | None]:
        """The buffer that has been free longest, and the event behind the device's last copies from it."""
        return next(iter(self._free.items()))

    def take(self, buffer: int) -> None:
        """Gives a free buffer to a job."""
        del self._free[buffer]

    def give_back(self, buffer: int, copied: Event) -> None:
        """Takes back a job's buffer, from which all copies are enqueued; `copied` is behind them."""
        self._free[buffer] = copied

    def events(self) -> Collection[Event | None]:
        """Events behind the copies from all free buffers, which the caller orders the next sealed word behind."""
        return self._free.values()

    def forget_events(self) -> None:
        """Notes that a sealed word is ordered behind `events`."""
        self._free = dict.fromkeys(self._free)


EXPOSED_COPIES = "h2d copies"
"""Name of the spans in the lane "h2d copies" that no computation hides."""


class Publisher:
    """Copies new weights of blocks from publish buffers into the model: during backward, slice by slice, or at the end of the step.

    Copies in backward run on a stream of their own, beside the gradient copies (d2h) and the kernels of backward. They are ordered behind
    an event, so a device that runs behind the host makes them in backward, even where the host enqueues them at the end of the step.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._copies = SideStream(rank.device)
        self.use(rank.partition)

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

    def copy_behind(self, event: Event, block: int, buffer: int, slices: Iterable[int], name: str) -> None:
        """Copies the new weights of some slices from a block's buffer on the stream of the copies.

        Args:
            event: from which on no kernel of the step reads or updates these weights.
            block: index into `Partition.blocks`.
            buffer: publish buffer of the block's job.
            slices: of `trained_slices`.
            name: of the span.
        """
        with self._copies.behind(event):
            self._copy(block, buffer, slices, name)

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
        self._copy(block, buffer, rest, EXPOSED_COPIES)

    def _copy(self, block: int, buffer: int, slices: Iterable[int], name: str) -> None:
        first = self._rank.partition.blocks[block].begin
        new_weights = self._rank.arena.publish[buffer]
        targets, sources, numel = [], [], 0
        for r in merge_ranges(r for index in sorted(slices) for r in self._ranges[block][index]):
            targets.append(self._rank.weights_at(r.param_group, r.begin, r.numel))
            sources.append(new_weights.narrow(0, r.begin - first, r.numel))
            numel += r.numel
        n_bytes = numel * new_weights.element_size()
        if targets:
            with self._rank.telemetry.tracer.span("h2d copies", name, n_bytes=n_bytes):
                torch._foreach_copy_(targets, sources, non_blocking=True)
        self._rank.telemetry.traffic.h2d_bytes += n_bytes
