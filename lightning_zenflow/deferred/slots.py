"""Where tiles' gradients lie in the arena's slots."""

from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena


class SlotViews:
    """Tiles' places in slots. Each is made when it is first asked for and kept, since every step asks for as many as there are tiles.

    Args:
        partition: the rank's partition.
        arena: has the slots.
    """

    def __init__(self, partition: Partition, arena: Arena) -> None:
        self._partition = partition
        self._arena = arena
        self._block_begins = {tile: block.begin for block in partition.blocks for tile in block.tiles}
        self._views: dict[tuple[int, int], Tensor] = {}

    def view(self, tile_index: int, slot: int) -> Tensor:
        """A tile's gradient in a slot of its block: [rows, width], model dtype, on the host.

        Args:
            tile_index: index into `Partition.tiles`.
            slot: index into `Arena.slots`.
        """
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = self._partition.tiles[tile_index]
            whole = self._arena.slots[slot].narrow(0, tile.begin - self._block_begins[tile_index], tile.numel)
            view = self._views[tile_index, slot] = whole.view(tile.rows, tile.width)
        return view
