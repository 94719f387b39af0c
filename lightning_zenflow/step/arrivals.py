"""Arrival of a step's gradients: slices, blocks and their squared norms."""

from collections.abc import Collection, Sequence, Set

from torch import Tensor

from lightning_zenflow.core.partition import Partition


class Arrivals:
    """Record of the gradients of the open step that have been routed; everything that depends on arrival reads it."""

    def __init__(self, partition: Partition) -> None:
        blocks: list[set[int]] = [{partition.tiles[tile].slice for tile in block.tiles} for block in partition.blocks]
        self._slices_of_block = blocks
        self._trained: Set[int] = frozenset(range(len(partition.slices)))
        self._arrived: set[int] = set()
        self._new: set[int] = set()
        self._missing: list[set[int]] = []
        self._blocks_of_slice: list[list[int]] = [[] for _ in partition.slices]
        for number, slices in enumerate(blocks):
            for index in slices:
                self._blocks_of_slice[index].append(number)
        self._complete: list[int] = []
        self.squared_norms: list[Tensor] = []
        """`SquaredNorms.parts` of the rank's gradients so far."""

    @property
    def arrived(self) -> Set[int]:
        """Slices whose gradient of the whole step has been routed."""
        return self._arrived

    @property
    def n_blocks(self) -> int:
        """Blocks of the partition."""
        return len(self._slices_of_block)

    def in_order_of_arrival(self) -> Sequence[int]:
        """Blocks in the order in which they were complete in the present or last step."""
        return self._complete

    @property
    def missing(self) -> list[int]:
        """Trained slices without a gradient so far, ascending."""
        return sorted(self._trained - self._arrived)

    def train(self, slices: Collection[int]) -> None:
        """Expects the gradients of these slices from the next step on."""
        self._trained = frozenset(slices)

    def open(self) -> None:
        """Begins a step."""
        self._arrived.clear()
        self._new.clear()
        self._complete.clear()
        self.squared_norms.clear()
        self._missing = [slices & self._trained for slices in self._slices_of_block]

    def slice_complete(self, index: int) -> list[int]:
        """Notes that a slice's gradient of the whole step has been routed.

        Returns:
            Blocks that are complete with it, ascending.
        """
        self._arrived.add(index)
        self._new.add(index)
        complete = []
        for block in self._blocks_of_slice[index]:
            self._missing[block].discard(index)
            if not self._missing[block]:
                complete.append(block)
        self._complete += complete
        return complete

    def take_new(self) -> Set[int]:
        """Slices that have been completed since the last call."""
        new, self._new = self._new, set()
        return new
