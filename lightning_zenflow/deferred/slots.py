"""Gradient slots: host memory for one gradient of one block."""

from collections.abc import Sequence

from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena


class SlotPool:
    """Owner of the arena's gradient slots. Each step takes one slot for every block.

    A slot belongs to the training thread from `prepare` until the job that applies its gradient is submitted, then to the worker, and is
    free again when the job is done. The slot freed last is taken first, so that a schedule touches no more memory than it needs.
    """

    def __init__(self, partition: Partition, arena: Arena) -> None:
        self._partition = partition
        self._arena = arena
        self._n_slots = 0
        self._free: list[int] = []
        self._of_step: list[int] = []  # for each block the slot of the step that is prepared or open
        self._prepared = False
        self._views: dict[tuple[int, int], Tensor] = {}

    @property
    def n_slots(self) -> int:
        """Slots in use at most."""
        return self._n_slots

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        self._free[:0] = reversed(range(self._n_slots, n_slots))
        self._n_slots = max(self._n_slots, n_slots)

    def prepare(self) -> None:
        """Takes the slots of the next step before its phase *open*, for gradients that are accumulated in host memory.

        A prepared slot is no part of a window yet; a flush between two micro-batches leaves it alone.
        """
        if not self._prepared:
            n_blocks = len(self._partition.blocks)
            assert len(self._free) >= n_blocks, "the schedule bounds the number of slots in use"
            self._of_step = [self._free.pop() for _ in range(n_blocks)]
            self._prepared = True

    def open(self) -> Sequence[int]:
        """Phase *open*: for each block the slot that the step's gradient goes to."""
        self.prepare()
        self._prepared = False
        return self._of_step

    def free(self, slots: Sequence[int]) -> None:
        """Takes back slots whose gradients have been applied or dropped."""
        self._free.extend(slots)

    def of_tile(self, tile_index: int) -> Tensor:
        """Destination of a tile's gradient in the step that is prepared or open.

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

    def of_slice(self, slice_index: int) -> list[tuple[int, Tensor]]:
        """Destinations of a slice's gradient: for each tile its first element in the slice, and its part of the slot, flat."""
        begin = self._partition.slices[slice_index].begin
        return [
            (self._partition.tiles[tile].begin - begin, self.of_tile(tile).view(-1))
            for tile in self._partition.tiles_by_slice[slice_index]
        ]
