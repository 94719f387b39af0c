"""Gradient slots: memory of the arena that goes back and forth between the training thread and the worker."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_zenflow.worker.rank_state import RankState

MAX_VIEWS = 1 << 16
"""Of tiles in slots that are kept, some 50 MB: long windows of large models have more of them."""


class SlotPool:
    """Owner of the arena's gradient slots: host memory for one gradient of one block.

    A slot belongs to the training thread from `acquire` until the job that applies its gradient is submitted, then to the worker, and is
    free again when the job is done. The slot freed last is taken first, so that a schedule touches no more memory than it needs.

    `end_step` and `free` are called within `RankState.books`, together with the callers' own changes.

    Attributes:
        n_slots: slots in use at most.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self.n_slots = 0
        self._free: list[int] = []
        self._of_step: dict[int, int] = {}  # for each block that has acquired one, the slot of the present or next step
        self._views: dict[tuple[int, int], Tensor] = {}

    @property
    def n_free(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        with self._rank.books:
            self._free[:0] = reversed(range(self.n_slots, n_slots))
            self.n_slots = max(self.n_slots, n_slots)

    def has_acquired(self, block: int) -> bool:
        """Whether a block has a slot for the present or next step."""
        return block in self._of_step

    def acquire(self, block: int) -> None:
        """Takes a free slot, of which there must be one, for a block's gradient of the present or next step."""
        with self._rank.books:
            self._of_step[block] = self._free.pop()

    def of_block(self, block: int) -> int:
        """The slot that a block has acquired."""
        return self._of_step[block]

    def end_step(self) -> Mapping[int, int]:
        """Ends phase *fill*; returns the slots that blocks have acquired for the step, by block."""
        of_step, self._of_step = self._of_step, {}
        return of_step

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
        partition = self._rank.partition
        block = partition.block_of_tile[tile_index]
        slot = self._of_step[block]
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = partition.tiles[tile_index]
            slots = self._rank.arena.slots
            first = slots.storage_offset() + slot * slots.stride(0) + tile.begin - partition.blocks[block].begin
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
