"""Gradients of biases and norms: many small vectors, copied and measured together."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition
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
    runs: list[tuple[int, Tensor]]
    """First tile of each run of tiles that are adjacent in the partition, and the gradients of the run, flat."""
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
            values, runs = self._values.narrow(0, begin, end - begin), _runs(partition, tiles)
            of_runs = zip(runs, torch.split(values, list(runs.values())), strict=True) if runs else ()
            self._blocks.append(_Block(values=values, tiles=tiles, of_tiles=views, runs=list(of_runs), slices=slices))
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

    def gradient(self, slice_index: int) -> Tensor:
        """The gradient that `keep` was called with for a contained slice."""
        return self._of_slice[slice_index]

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
        # A copy to the host is a call of its own, so that neighbours are copied as one.
        runs = [run for block in blocks for run in block.runs]
        slots = [self._slots.view(first).as_strided((of_run.numel(),), (1,)) for first, of_run in runs]
        with self._rank.telemetry.tracer.span("d2h copies", n_bytes=values.nbytes):
            torch._foreach_copy_(slots, [of_run for _, of_run in runs], non_blocking=True)
        self._rank.telemetry.traffic.d2h_bytes += values.nbytes
        targets, sources = [], []
        for block in blocks:
            for tile, gradient in zip(block.tiles, block.of_tiles, strict=True):
                for selection in self._ownership.selections(tile):
                    targets.append(selection.target)
                    sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        # In float64, so that the sum does not depend on which vectors are measured together.
        return [torch.linalg.vector_norm(values, dim=0, keepdim=True, dtype=torch.float64).square_()]


def _runs(partition: Partition, tiles: Iterable[int]) -> dict[int, int]:
    """First tile of each run of tiles that are adjacent in the partition, and the elements of the run."""
    runs: dict[int, int] = {}
    first = end = -1
    for index in tiles:
        tile = partition.tiles[index]
        if tile.begin != end:
            first = index
        runs[first] = runs.get(first, 0) + tile.numel
        end = tile.end
    return runs
