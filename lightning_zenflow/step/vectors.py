"""Gradients of biases and norms, which are many and small: kept where they arrive, and handled a block or a step at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.topk.ownership import Ownership

_LARGEST_NUMEL = 1 << 16
"""Of a slice that is handled so. What is kept takes memory on the device, and larger ones are worth a pass of their own."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """What lies in one block."""

    values: Tensor
    """[n], a view: all of it is one piece, since blocks and slices ascend alike."""
    tiles: list[int]
    """Indexes into `Partition.tiles`."""
    of_tiles: list[Tensor]
    """Their gradients, [rows, width], views."""
    slices: set[int]


class VectorGradients:
    """Owner of one step's gradients of small vectors, one after the other in one tensor on the device.

    A transformer has two to three vectors for every matrix, and what a vector costs is not its elements but the calls that are made for
    it: here one when it arrives, the others for all of them together, at the end of backward or when their block is handed over. They
    have no columns to choose from, so there are no proxies and no stand-in to wait for. Slices that have no gradient in a step have the
    gradient zero.

    Args:
        partition: the rank's partition.
        jobs: where gradients go.
        ownership: which entries' gradients are kept on the device.
        kernels: passes over gradients.
        tracer: records the copies.
        traffic: where copied bytes are counted.
        device: where gradients come from.
        dtype: the model's type.
    """

    def __init__(
        self,
        partition: Partition,
        jobs: JobQueue,
        ownership: Ownership,
        kernels: Kernels,
        tracer: Tracer,
        traffic: Traffic,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._jobs = jobs
        self._ownership = ownership
        self._kernels = kernels
        self._tracer = tracer
        self._traffic = traffic
        small = {i: s for i, s in enumerate(partition.slices) if not s.is_matrix and s.numel <= _LARGEST_NUMEL}
        numels = [s.numel for s in small.values()]
        self._values = torch.zeros(sum(numels), device=device, dtype=dtype)
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
        self._kept: set[int] = set()
        self._filled: set[int] = set()
        self._totals: list[Tensor] = []

    def __contains__(self, slice_index: int) -> bool:
        return slice_index in self._of_slice

    def keep(self, slice_index: int, gradient: Tensor) -> None:
        """Takes one slice's gradient of the whole step.

        Args:
            slice_index: one that it contains.
            gradient: [slice.numel], model dtype, on the device.
        """
        self._of_slice[slice_index].copy_(gradient)
        self._kept.add(slice_index)

    def fill(self, block: int) -> Tensor | None:
        """Phase *fill* of `JobQueue` for one block, which is handed over next: all of its slices that have a gradient have been kept.

        Returns:
            Sum of squares: 0-D float64 on the device; None if the block has nothing small.
        """
        self._filled.add(block)
        return self._fill([self._blocks[block]], self._blocks[block].values)

    def finish(self) -> list[Tensor]:
        """Phase *fill* for what is left of the step.

        Returns:
            Sums of squares, 0-D float64 on the device; together of all that has been kept in the step.
        """
        if self._filled:
            rest = [block for number, block in enumerate(self._blocks) if number not in self._filled]
            for block in rest:
                self._fill([block], block.values)
        else:
            self._fill(self._blocks, self._values)
        totals = list(self._totals)
        self._kept.clear()
        self._filled.clear()
        self._totals.clear()
        return totals

    def _fill(self, blocks: Sequence[_Block], values: Tensor) -> Tensor | None:
        """Some blocks; `values` is what they have together."""
        if not values.numel():
            return None
        missing = set().union(*(block.slices for block in blocks)) - self._kept
        for index in missing:
            self._of_slice[index].zero_()
        n_bytes = values.numel() * values.element_size()
        tiles = [tile for block in blocks for tile in block.tiles]
        gradients = [gradient for block in blocks for gradient in block.of_tiles]
        with self._tracer.span("d2h copies", n_bytes=n_bytes):
            torch._foreach_copy_([self._jobs.slot(tile) for tile in tiles], gradients, non_blocking=True)
        self._traffic.d2h_bytes += n_bytes
        targets, sources = [], []
        for tile, gradient in zip(tiles, gradients, strict=True):
            for selection in self._ownership.selections(tile):
                targets.append(selection.target)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        total = self._kernels.squared_norms(values.view(1, -1), per_axis=False).total
        self._totals.append(total)
        return total
