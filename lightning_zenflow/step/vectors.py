"""Gradients of biases and norms: many small vectors, copied and measured together."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.deferred.slots import SlotPool
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.worker.rank_state import RankState

_LARGEST_NUMEL = 1 << 16
"""Elements of a slice that is handled here. Kept gradients take device memory, and larger ones are worth a pass of their own."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Vectors of one block."""

    values: Tensor
    """[n], a contiguous view, because blocks and slices ascend alike."""
    tiles: list[int]
    """Indexes into `Partition.tiles`."""
    of_tiles: list[Tensor]
    """Gradients of the tiles, [rows, width], views."""
    slices: set[int]


class VectorGradients:
    """Owner of one step's gradients of small vectors, concatenated in one tensor on the device.

    A transformer has two to three vectors for every matrix, and the cost of a vector is the calls that are made for it. Here one call is
    made when its gradient arrives; all others serve many vectors at once, at the end of backward or when their block is submitted. Vectors
    have no columns to choose from, hence no proxies and no provisional update. A slice without gradient has the gradient zero.
    """

    def __init__(self, rank: RankState, slots: SlotPool, ownership: Ownership) -> None:
        self._rank = rank
        self._slots = slots
        self._ownership = ownership
        partition = rank.partition
        small = {i: s for i, s in enumerate(partition.slices) if not s.is_matrix and s.numel <= _LARGEST_NUMEL}
        numels = [s.numel for s in small.values()]
        self._values = torch.zeros(sum(numels), device=rank.device, dtype=rank.dtype)
        self._of_slice = dict(zip(small, torch.split(self._values, numels), strict=True))
        self._blocks: list[_Block] = []
        end = 0
        for block in partition.blocks:
            begin, views = end, []
            tiles = [tile for tile in block.tiles if partition.tiles[tile].slice in small]
            for tile in (partition.tiles[index] for index in tiles):
                views.append(self._values.narrow(0, end, tile.numel).view(tile.rows, tile.width))
                end += tile.numel
            slices = {partition.tiles[tile].slice for tile in tiles}
            values = self._values.narrow(0, begin, end - begin)
            self._blocks.append(_Block(values=values, tiles=tiles, of_tiles=views, slices=slices))
        assert end == self._values.numel(), "blocks and slices ascend alike"

    def __contains__(self, slice_index: int) -> bool:
        return slice_index in self._of_slice

    def keep(self, slice_index: int, gradient: Tensor) -> None:
        """Keeps one slice's gradient of the whole step.

        Args:
            slice_index: a contained slice.
            gradient: [slice.numel], model dtype, on the device.
        """
        self._of_slice[slice_index].copy_(gradient)

    def fill(self, arrived: Set[int], *, block: int) -> Sequence[Tensor]:
        """Phase *fill* of one block, which is submitted next.

        Args:
            arrived: slices whose gradients have been kept in this step.
            block: index into `Partition.blocks`.

        Returns:
            `SquaredNorms.parts`; empty where the block has no vectors.
        """
        return self._fill([self._blocks[block]], self._blocks[block].values, arrived)

    def finish(self, arrived: Set[int], *, filled: Set[int]) -> Sequence[Tensor]:
        """Phase *fill* of all blocks, at the end of backward.

        Args:
            arrived: slices whose gradients have been kept in this step.
            filled: blocks that `fill` has been called for.

        Returns:
            `SquaredNorms.parts`.
        """
        if not filled:
            return self._fill(self._blocks, self._values, arrived)
        rest = (block for number, block in enumerate(self._blocks) if number not in filled)
        return [norm for block in rest for norm in self._fill([block], block.values, arrived)]

    def _fill(self, blocks: Sequence[_Block], values: Tensor, arrived: Set[int]) -> Sequence[Tensor]:
        """Fills some blocks; `values` is the concatenation of theirs."""
        if not values.numel():
            return ()
        for index in set().union(*(block.slices for block in blocks)) - arrived:
            self._of_slice[index].zero_()
        tiles = [tile for block in blocks for tile in block.tiles]
        gradients = [gradient for block in blocks for gradient in block.of_tiles]
        with self._rank.telemetry.tracer.span("d2h copies", n_bytes=values.nbytes):
            torch._foreach_copy_([self._slots.of_tile(tile) for tile in tiles], gradients, non_blocking=True)
        self._rank.telemetry.traffic.d2h_bytes += values.nbytes
        targets, sources = [], []
        for tile, gradient in zip(tiles, gradients, strict=True):
            for selection in self._ownership.selections(tile):
                targets.append(selection.target)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        return [self._rank.kernels.squared_norms(values.view(1, -1), per_axis=False).parts]
