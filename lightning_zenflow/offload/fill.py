"""Phase *fill*: a step's gradients on their way to the slots and to device-owned columns, before DeepSpeed reuses their buffer. Sums over
micro-batches, on the device or in the slots; what has arrived; small vectors, which are handled together.
"""

import logging
from collections.abc import Iterable, Sequence, Set
from typing import Literal

import torch
from torch import Tensor

from lightning_zenflow.core.device import has_room, runtime_of
from lightning_zenflow.core.partition import tiles_of_slice
from lightning_zenflow.core.step_inputs import GradientNorms
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.offload.in_backward import BackwardSubmission
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.ownership import Ownership
from lightning_zenflow.offload.plan import StepContext
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Block, RankState, SlotPool, Vectors

_log = logging.getLogger(__name__)


class Accumulation:
    """Owner of the gradients of micro-batches that are not their step's last.

    Sums are in device memory, as much as the rank's part of the gradients; or in the slots that the step's gradients go to in the end. Then
    the device needs memory for the largest slice only, and each sum crosses PCIe both ways, in stream order; the host does not wait. Sums
    are rounded to the model's type after each micro-batch: the same bits wherever they are.

    Args:
        jobs: with sums on the host, a block acquires its slot at the first micro-batch, before phase *open*.
        where: `ZenFlowConfig.accumulate_on`. "auto" is decided at the first micro-batch, when the device's memory has been as full as it
            gets.

    Attributes:
        pending: slices with a sum that has not been taken.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, *, where: Literal["auto", "device", "host"]) -> None:
        self._rank = rank
        self._jobs = jobs
        self._where = where
        self._on_device: Tensor | None = None  # [partition.numel], model dtype
        self.pending: set[int] = set()

    def add(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Adds a gradient of a micro-batch that is not the step's last.

        Args:
            slice_index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; may be changed in place.
            step: number of the step.
        """
        if self._where == "auto":
            room = has_room(self._rank.partition.numel * self._rank.dtype.itemsize, self._rank.device)
            self._where = "device" if room else "host"
            _log.info("ZenFlow: accumulate_on='auto': gradients are accumulated on the %s", self._where)
        if self._where == "host":
            if slice_index in self.pending:
                gradient.add_(self._sum(slice_index))
            else:
                self._jobs.acquire(self._rank.blocks.of_slice[slice_index], step)
            for begin, slot in self._jobs.slots.views_of_slice(slice_index):
                slot.copy_(gradient.narrow(0, begin, slot.numel()), non_blocking=True)
                self._rank.telemetry.d2h_bytes += slot.nbytes
        elif slice_index in self.pending:
            self._sum(slice_index).add_(gradient)
        else:
            self._sum(slice_index).copy_(gradient)
        self.pending.add(slice_index)

    def peek(self, slice_index: int) -> Tensor | None:
        """A pending sum, which stays pending: [slice.numel], model dtype, on the device; None if there is none."""
        return self._sum(slice_index) if slice_index in self.pending else None

    def take(self, slice_index: int) -> Tensor | None:
        """As `peek`; the sum is no longer pending."""
        total = self.peek(slice_index)
        self.pending.discard(slice_index)
        return total

    def release(self) -> Tensor | None:
        """Frees the device memory of the sums where none is pending; where some are, returns it."""
        if not self.pending:
            self._on_device = None
        return self._on_device

    def _sum(self, slice_index: int) -> Tensor:
        rank, s = self._rank, self._rank.partition.slices[slice_index]
        if self._where == "device":
            if self._on_device is None:
                self._on_device = torch.empty(rank.partition.numel, dtype=rank.dtype, device=rank.device)
            return self._on_device.narrow(0, s.begin, s.numel)
        total = torch.empty(s.numel, dtype=rank.dtype, device=rank.device)
        for begin, slot in self._jobs.slots.views_of_slice(slice_index):
            total.narrow(0, begin, slot.numel()).copy_(slot, non_blocking=True)
            rank.telemetry.h2d_bytes += slot.nbytes
        return total


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

    def route(self, context: StepContext, index: int, gradient: Tensor) -> list[Tensor]:
        """Copies one slice's gradient to its destinations, measures it, and updates weights provisionally where some forward pass will lack
        it; in stream order behind its reduction.

        Args:
            context: inputs of the step; squared norms of columns are added to it.
            index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; of the whole step.

        Returns:
            `SquaredNorms.parts`.
        """
        s = self._rank.partition.slices[index]
        column_norms = context.column_norms if s.is_matrix else None
        may_be_late = self._provisional.applies_to(index) and not context.plan.shows_exact_weights
        parts_of_norm, update = [], None
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
            parts_of_norm.append(norms.parts)
            if column_norms is not None:
                column_norms.of_parameter[s.parameter].narrow(0, tile.first_column, tile.width).add_(norms.columns)
            if late:
                update = matrix, norms, late
        if update is not None:
            self._provisional.apply_gradient(context, index, *update)
        return parts_of_norm

    def route_zeros(self, index: int) -> None:
        """Routes a slice without any gradient in the step."""
        for _, parts in self._rectangles[index]:
            for destination in self._destinations(parts):
                # From the device: in the order of its streams, the slot may still be read for an update that is reapplied.
                destination.slot.copy_(self._zero.expand_as(destination.slot), non_blocking=True)
                for selection in destination.selections:
                    selection.entries.zero_()

    def _destinations(self, parts: Iterable[tuple[int, Block, int]]) -> list[Destination]:
        return [
            Destination(begin=begin, slot=self._slots.view(part), selections=self._ownership.selections(part))
            for part, _, begin in parts
        ]


_LARGEST_NUMEL = 1 << 16
"""Elements of a slice that `VectorGradients` handles. Kept gradients take device memory, and larger ones are worth a pass of their own."""


class VectorGradients:
    """Owner of one step's gradients of small vectors, concatenated in one tensor on the device.

    A transformer has two to three vectors for every matrix, and the cost of a vector is the calls that are made for it. Here one call is
    made when its gradient arrives; all others serve many vectors at once, at the end of backward or when their block is submitted. Vectors
    have no columns to choose from, hence no proxies and no provisional update. A slice without gradient has the gradient zero.

    Attributes:
        of_slice: for each small vector's slice the step's gradient, once it is there: [slice.numel], model dtype, on the device.
    """

    def __init__(self, rank: RankState, slots: SlotPool, ownership: Ownership) -> None:
        self._rank = rank
        self._slots = slots
        self._ownership = ownership
        partition = rank.partition
        small = {i: s for i, s in enumerate(partition.slices) if not s.is_matrix and s.numel <= _LARGEST_NUMEL}
        numels = [s.numel for s in small.values()]
        self._values = torch.zeros(sum(numels), device=rank.device, dtype=rank.dtype)
        self.of_slice = dict(zip(small, torch.split(self._values, numels), strict=True))
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

    def fill(self, blocks: Sequence[Block], arrived: Set[int]) -> Sequence[Tensor]:
        """Phase *fill* of some blocks, which are submitted next, or of all others at the end of backward.

        Args:
            blocks: some of them, ascending; all of them are filled in one pass.
            arrived: slices whose gradients are there.

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
            self.of_slice[index].zero_()
        # A copy to the host is a call of its own, so that neighbours are copied as one.
        runs = [run for block in blocks for run in block.runs]
        slots = [self._slots.view(first).as_strided((of_run.numel(),), (1,)) for first, of_run in runs]
        torch._foreach_copy_(slots, [of_run for _, of_run in runs], non_blocking=True)
        self._rank.telemetry.d2h_bytes += values.nbytes
        targets, sources = [], []
        for block in blocks:
            for tile, gradient in block.tiles:
                for selection in self._ownership.selections(tile):
                    targets.append(selection.entries)
                    sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        # In float64, so that the sum does not depend on which vectors are measured together.
        return [torch.linalg.vector_norm(values, dim=0, keepdim=True, dtype=torch.float64).square_()]


class Fill:
    """Phase *fill* of `JobQueue`: the gradients of a step, from their reduction to the slots, and all that is done when one arrives.

    Args:
        accumulate_on: `ZenFlowConfig.accumulate_on`.
        speculates: see `BackwardSubmission`.

    Attributes:
        accumulation: sums over earlier micro-batches.
        trained: slices whose gradients are expected.
        norms: squared norms of what has arrived.
        in_backward: submission of complete blocks.
    """

    def __init__(
        self,
        rank: RankState,
        jobs: JobQueue,
        ownership: Ownership,
        provisional: ProvisionalUpdate,
        *,
        accumulate_on: Literal["auto", "device", "host"],
        speculates: bool,
    ) -> None:
        self._rank = rank
        self._jobs = jobs
        self._provisional = provisional
        self.accumulation = Accumulation(rank, jobs, where=accumulate_on)
        self._router = GradientRouter(rank, jobs.slots, ownership, provisional)
        self._vectors = VectorGradients(rank, jobs.slots, ownership)
        self.trained: Set[int] = frozenset(range(len(rank.partition.slices)))
        self._arrived: dict[int, None] = {}
        self._new: set[int] = set()  # those of them that `JobsInFlight.poll` does not know yet
        self.norms = GradientNorms(len(rank.blocks), rank.device)
        self.in_backward = BackwardSubmission(rank, jobs, self.norms, self._vectors, speculates=speculates)

    @property
    def arrived(self) -> Set[int]:
        """Slices whose gradient of the whole step has been routed, in that order."""
        return self._arrived.keys()

    def accumulate(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Takes a gradient of a micro-batch that is not its step's last; as `Accumulation.add`."""
        if slice_index in self.trained:
            self.accumulation.add(slice_index, gradient, step)

    def open(self, context: StepContext) -> None:
        """Begins a step; before the first gradient of its last micro-batch."""
        self._jobs.open(context.number)
        self._arrived.clear()
        self._new.clear()
        for block in self._rank.blocks:
            block.missing = block.slices & self.trained
        self.norms.open(context.inputs.loss_scale)
        self.in_backward.open()
        self._provisional.open(context.inputs.loss_scale)

    def receive(self, context: StepContext, slice_index: int, gradient: Tensor) -> None:
        """Takes a gradient of the last micro-batch: [slice.numel], model dtype, on the device; may be changed in place."""
        # A parameter that was unfrozen between two micro-batches is trained from the next step on.
        if slice_index in self.trained:
            earlier = self.accumulation.take(slice_index)
            complete = self._route(context, slice_index, gradient if earlier is None else gradient.add_(earlier))
            if complete and context.plan.submits_in_backward:
                self.in_backward.submit(complete, self.arrived, context)

    def finish(self, context: StepContext) -> Tensor:
        """Routes the gradients of parameters that the last micro-batch did not use, after backward.

        Returns:
            Squared norm of this rank's gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in sorted(self.accumulation.pending):
            total = self.accumulation.take(index)
            assert total is not None
            self._route(context, index, total)
            # The next step writes to the sum's memory.
            self._rank.d2h.join()
        for index in sorted(self.trained - self.arrived):
            if index not in self._vectors.of_slice:
                self._jobs.acquire(self._rank.blocks.of_slice[index], context.number)
                self._router.route_zeros(index)
                self._slice_complete(index)
        self._poll(context.number)
        self._jobs.acquire(self._rank.blocks, context.number)
        rest = [block for block in self._rank.blocks if block not in self._jobs.submitted_in_backward]
        self.norms.add(self._vectors.fill(rest, self.arrived))
        return self.norms.whole()

    def gradient(self, slice_index: int) -> Tensor:
        """Gradient of a slice in the step that is next, where `ZenFlowStep.has_gradients`; to be read before it. Waits for the device.

        Returns:
            [slice.numel], model dtype, on the device or the host.
        """
        pending = self.accumulation.peek(slice_index)
        if pending is not None:
            return pending
        if slice_index not in self._arrived:
            s = self._rank.partition.slices[slice_index]
            return torch.zeros(s.numel, dtype=self._rank.dtype, device=self._rank.device)
        if slice_index in self._vectors.of_slice:
            return self._vectors.of_slice[slice_index]
        # The copies to the slots.
        runtime_of(self._rank.device).synchronize()
        return torch.cat([slot for _, slot in self._jobs.slots.views_of_slice(slice_index)])

    def unused(self) -> list[int]:
        """Trained slices without a gradient in the step that is next, ascending."""
        return sorted(self.trained - self.arrived - self.accumulation.pending)

    def _route(self, context: StepContext, slice_index: int, gradient: Tensor) -> list[Block]:
        """Routes one slice's gradient of the whole step; returns the blocks that are complete with it."""
        if slice_index in self._vectors.of_slice:
            self._vectors.of_slice[slice_index].copy_(gradient)
            return self._slice_complete(slice_index)
        self._jobs.acquire(self._rank.blocks.of_slice[slice_index], context.number)
        self.norms.add(self._router.route(context, slice_index, gradient))
        complete = self._slice_complete(slice_index)
        self._poll(context.number)
        return complete

    def _slice_complete(self, index: int) -> list[Block]:
        """Notes that a slice's gradient of the whole step has been routed; returns the blocks that are complete with it, ascending."""
        self._arrived[index] = None
        self._new.add(index)
        blocks = self._rank.blocks.of_slice[index]
        for block in blocks:
            block.missing.discard(index)
        return [block for block in blocks if not block.missing]

    def _poll(self, step: int) -> None:
        new, self._new = self._new, set()
        self._jobs.in_flight.poll(step, new)
