"""Routes the reduced gradients of a step to the slots and to device-owned columns, before DeepSpeed reuses their buffer."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import tiles_of_slice
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.offload.ownership import Ownership
from lightning_zenflow.offload.plan import StepContext
from lightning_zenflow.offload.provisional_update import LateGradient, ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Block, RankState, SlotPool


class GradientRouter:
    """Routes this rank's slices of reduced gradients, but for those of `VectorGradients`.

    The blocks of a slice have acquired their slots before. A parameter without a gradient in a step has the gradient zero, as under ZeRO-2
    without offload: its moments decay.
    """

    def __init__(self, rank: RankState, slots: SlotPool, ownership: Ownership, provisional: ProvisionalUpdate) -> None:
        self._rank = rank
        self._slots = slots
        self._ownership = ownership
        self._provisional = provisional
        partition = rank.partition
        self._zero = torch.zeros((), dtype=rank.dtype, device=rank.device)
        # For each slice the rectangles that squared norms are taken of, which must not depend on blocks; and for each tile of the partition
        # that block boundaries cut them into: its index, its block and its first element in the rectangle.
        self._rectangles = [
            [
                (
                    rectangle,
                    [
                        (part, rank.blocks.of_tile[part], partition.tiles[part].begin - rectangle.begin)
                        for part in partition.tiles_by_slice[index]
                        if rectangle.begin <= partition.tiles[part].begin < rectangle.end
                    ],
                )
                for rectangle in tiles_of_slice(index, s)
            ]
            for index, s in enumerate(partition.slices)
        ]

    def route(self, context: StepContext, index: int, gradient: Tensor) -> tuple[list[Tensor], LateGradient | None]:
        """Copies one slice's gradient to its destinations and measures it; in stream order behind its reduction.

        Args:
            context: inputs of the step; squared norms of columns are added to it.
            index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; of the whole step.

        Returns:
            `SquaredNorms.parts`; and what some forward pass will lack, None: nothing, or nothing that is updated provisionally.
        """
        s = self._rank.partition.slices[index]
        column_norms = context.column_norms if s.is_matrix else None
        may_be_late = self._provisional.applies_to(index) and not context.plan.shows_exact_weights
        squared_norms, late_gradient = [], None
        for tile, parts in self._rectangles[index]:
            # Most slices are one rectangle.
            part = gradient if tile.numel == s.numel else gradient.narrow(0, tile.begin - s.begin, tile.numel)
            matrix = part.view(tile.rows, tile.width)
            destinations = self._destinations(parts)
            late = []
            if may_be_late and tile.rows > 1:
                late = list(zip((block for _, block, _ in parts), destinations, strict=True))
            per_axis = column_norms is not None or bool(late)
            norms = self._rank.kernels.route(
                matrix, destinations, per_axis=per_axis, copies=self._rank.d2h.behind(reads=matrix)
            )
            self._rank.telemetry.d2h_bytes += matrix.nbytes
            squared_norms.append(norms.parts)
            if column_norms is not None:
                column_norms.of_parameter[s.parameter].narrow(0, tile.first_column, tile.width).add_(norms.columns)
            if late:
                late_gradient = LateGradient(slice=index, gradient=matrix, squared_norms=norms, tiles=late)
        return squared_norms, late_gradient

    def route_zeros(self, index: int) -> None:
        """Routes a slice without any gradient in the step."""
        for _, parts in self._rectangles[index]:
            for destination in self._destinations(parts):
                # From the device: in the order of its streams, the slot may still be read for an update that is reapplied.
                destination.slot.copy_(self._zero.expand_as(destination.slot), non_blocking=True)
                for selection in destination.selections:
                    selection.target.zero_()

    def gradient(self, index: int, *, is_routed: bool) -> Tensor:
        """A slice's gradient of the open step, zero if none has been routed; waits for the device.

        Returns:
            [slice.numel], model dtype, on the device or the host.
        """
        if not is_routed:
            return self._zero.expand(self._rank.partition.slices[index].numel)
        # The copies to the slots.
        runtime_of(self._rank.device).synchronize()
        return torch.cat([slot for _, slot in self._slots.views_of_slice(index)])

    def _destinations(self, parts: Iterable[tuple[int, Block, int]]) -> list[Destination]:
        return [
            Destination(begin=begin, slot=self._slots.view(part), selections=self._ownership.selections(part))
            for part, _, begin in parts
        ]


_LARGEST_NUMEL = 1 << 16
"""Elements of a slice that is handled here. Kept gradients take device memory, and larger ones are worth a pass of their own."""


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Vectors of one block."""

    values: Tensor
    """[n], a contiguous view, because blocks and slices ascend alike."""
    tiles: list[tuple[int, Tensor]]
    """Indexes into `Partition.tiles`, with the gradients of the tiles, [rows, width]; views."""
    runs: list[tuple[int, Tensor]]
    """First tile of each run of tiles that are adjacent in the partition, with the gradients of the run, flat; views."""
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
        end = 0
        for block in rank.blocks:
            begin, tiles = end, []
            for index in (index for index in block.tiles if partition.tiles[index].slice in small):
                tile = partition.tiles[index]
                tiles.append((index, self._values.narrow(0, end, tile.numel).view(tile.rows, tile.width)))
                end += tile.numel
            slices = {partition.tiles[index].slice for index, _ in tiles}
            values, runs = self._values.narrow(0, begin, end - begin), partition.runs(index for index, _ in tiles)
            of_runs = zip(runs, torch.split(values, list(runs.values())), strict=True) if runs else ()
            block.vectors = Vectors(values=values, tiles=tiles, runs=list(of_runs), slices=slices)
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

    def fill(self, blocks: Sequence[Block], arrived: Set[int]) -> Sequence[Tensor]:
        """Phase *fill* of some blocks, which are submitted next, or of all others at the end of backward.

        Args:
            blocks: some of them, ascending; all of them are filled in one pass.
            arrived: slices whose gradients have been kept in this step.

        Returns:
            `SquaredNorms.parts`; empty where the blocks have no vectors.
        """
        of_blocks = [block.vectors for block in blocks if block.vectors is not None]
        if len(blocks) == len(self._rank.blocks):
            return self._fill(of_blocks, self._values, arrived)
        return [norm for vectors in of_blocks for norm in self._fill([vectors], vectors.values, arrived)]

    def _fill(self, blocks: Sequence[Vectors], values: Tensor, arrived: Set[int]) -> Sequence[Tensor]:
        """Fills some blocks; `values` is the concatenation of theirs."""
        if not values.numel():
            return ()
        for index in set().union(*(block.slices for block in blocks)) - arrived:
            self._of_slice[index].zero_()
        # A copy to the host is a call of its own, so that neighbours are copied as one.
        runs = [run for block in blocks for run in block.runs]
        slots = [self._slots.view(first).as_strided((of_run.numel(),), (1,)) for first, of_run in runs]
        torch._foreach_copy_(slots, [of_run for _, of_run in runs], non_blocking=True)
        self._rank.telemetry.d2h_bytes += values.nbytes
        targets, sources = [], []
        for block in blocks:
            for tile, gradient in block.tiles:
                for selection in self._ownership.selections(tile):
                    targets.append(selection.target)
                    sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        # In float64, so that the sum does not depend on which vectors are measured together.
        return [torch.linalg.vector_norm(values, dim=0, keepdim=True, dtype=torch.float64).square_()]
