"""Memory of the arena that goes back and forth between the training thread and the worker: gradient slots and publish buffers."""

from collections.abc import Collection, Sequence

from torch import Tensor

from lightning_zenflow.core.device import Event
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.under_way import UnderWay
from lightning_zenflow.worker.arena import Arena


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

    def events(self) -> list[Event]:
        """Events behind the copies from all free buffers, which the caller orders the next sealed word behind."""
        return [event for event in self._free.values() if event is not None]

    def forget_events(self) -> None:
        """Notes that a sealed word is ordered behind `events`."""
        self._free = dict.fromkeys(self._free)
