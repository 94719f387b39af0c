"""Gradient slots: host memory for one gradient of one block."""

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.under_way import UnderWay
from lightning_zenflow.worker.arena import Arena


class SlotPool:
    """Owner of the arena's gradient slots. A block takes a slot for a step when its first gradient is about to be written there.

    A slot belongs to the training thread from then until the job that applies its gradient is submitted, then to the worker, and is free
    again when the job is done. The slot freed last is taken first, so that a schedule touches no more memory than it needs.

    Args:
        books: see `RankState`. Entered by the callers of all methods that change more than one record with theirs.
    """

    def __init__(self, partition: Partition, arena: Arena, books: UnderWay) -> None:
        self._partition = partition
        self._arena = arena
        self._books = books
        self._n_slots = 0
        self._free: list[int] = []
        self._of_step: dict[int, int] = {}  # for each block that has taken one, the slot of the present or next step
        self._handed_over: set[int] = set()  # blocks; their slots of the open step can still be read
        self._is_open = False
        self._make_room: Callable[[], None] | None = None
        self._views: dict[tuple[int, int], Tensor] = {}

    @property
    def n_slots(self) -> int:
        """Slots in use at most."""
        return self._n_slots

    @property
    def n_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def is_open(self) -> bool:
        """Whether gradients of a step's last micro-batch are being written."""
        return self._is_open

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        with self._books:
            self._free[:0] = reversed(range(self._n_slots, n_slots))
            self._n_slots = max(self._n_slots, n_slots)

    def make_room_by(self, make_room: Callable[[], None]) -> None:
        """Sets what is called when a slot is to be taken and none is free; it frees one."""
        self._make_room = make_room

    def open(self) -> None:
        """Phase *open*. Slots that are taken before, for sums of micro-batches in host memory, are the step's as well."""
        self._is_open = True

    def close(self) -> None:
        """Ends phase *fill*, after every block's slot has been handed over."""
        assert self._handed_over == self._of_step.keys()
        self._end_step()

    def take(self, block: int) -> int:
        """The slot of a block in the open step, or in the next one; takes a free one first, if the block has none.

        Where none is free, it waits until one is.
        """
        slot = self._of_step.get(block)
        if slot is None:
            if not self._free and self._make_room is not None:
                self._make_room()
            with self._books:
                slot = self._of_step[block] = self._free.pop()
        return slot

    def hand_over(self, block: int) -> int:
        """The slot that a block has taken in the open step, which from now on belongs to the block's window."""
        self._handed_over.add(block)
        return self._of_step[block]

    def drop_open(self) -> list[int]:
        """Ends an open step that was interrupted; returns its slots that are no window's. Sums of micro-batches before a step stay."""
        if not self._is_open:
            return []
        dropped = [slot for block, slot in self._of_step.items() if block not in self._handed_over]
        self._end_step()
        return dropped

    def free(self, slots: Sequence[int]) -> None:
        """Takes back slots whose gradients have been applied or dropped."""
        self._free.extend(slots)

    def of_tile(self, tile_index: int) -> Tensor:
        """Destination of a tile's gradient in the open step, or in the next one.

        Args:
            tile_index: index into `Partition.tiles`.

        Returns:
            [rows, width], model dtype, host memory (page-locked for a CUDA device); to be written in stream order.
        """
        # Views are cached: every step asks for as many as there are tiles.
        block = self._partition.block_of_tile[tile_index]
        slot = self.take(block)
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = self._partition.tiles[tile_index]
            whole = self._arena.slots[slot].narrow(0, tile.begin - self._partition.blocks[block].begin, tile.numel)
            view = self._views[tile_index, slot] = whole.view(tile.rows, tile.width)
        return view

    def of_slice(self, slice_index: int) -> list[tuple[int, Tensor]]:
        """Destinations of a slice's gradient: for each tile its first element in the slice, and its part of the slot, flat."""
        begin = self._partition.slices[slice_index].begin
        return [
            (self._partition.tiles[tile].begin - begin, self.of_tile(tile).view(-1))
            for tile in self._partition.tiles_by_slice[slice_index]
        ]

    def _end_step(self) -> None:
        self._of_step.clear()
        self._handed_over.clear()
        self._is_open = False
