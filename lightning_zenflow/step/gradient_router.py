"""Routes a reduced gradient to its destinations before DeepSpeed reuses its buffer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Partition, Tile, tiles_of_slice
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.provisional_update import ProvisionalUpdate, TileGradient
from lightning_zenflow.deferred.publish import Publisher
from lightning_zenflow.deferred.slots import SlotPool
from lightning_zenflow.kernels.base import Destination, add_up
from lightning_zenflow.step.accumulation import Accumulation
from lightning_zenflow.step.arrivals import Arrivals
from lightning_zenflow.step.context import StepContext
from lightning_zenflow.step.in_backward import BackwardSubmission
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.worker.rank_state import RankState


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rectangle:
    """Rectangle of a slice that squared norms are taken of, and the partition's tiles that block boundaries cut it into."""

    tile: Tile
    parts: tuple[int, ...]
    """Indexes into `Partition.tiles`."""
    begins: tuple[int, ...]
    """First element of each part, counted over the rectangle."""

    @classmethod
    def of(cls, tile: Tile, partition: Partition, parts: Sequence[int]) -> "_Rectangle":
        """Finds the parts among the tiles of the slice."""
        inside = [i for i in parts if tile.begin <= partition.tiles[i].begin < tile.end]
        return cls(tile=tile, parts=tuple(inside), begins=tuple(partition.tiles[i].begin - tile.begin for i in inside))


class GradientRouter:
    """Routes this rank's slices of reduced gradients, one optimizer step at a time.

    A parameter without a gradient in a step has the gradient zero, as under ZeRO-2 without offload: its moments decay.
    """

    def __init__(
        self,
        rank: RankState,
        slots: SlotPool,
        jobs: JobQueue,
        publisher: Publisher,
        ownership: Ownership,
        provisional: ProvisionalUpdate,
    ) -> None:
        self._rank = rank
        self._slots = slots
        self._jobs = jobs
        self._publisher = publisher
        self._ownership = ownership
        self._provisional = provisional
        self.arrivals = Arrivals(rank.partition)
        self._vectors = VectorGradients(rank, slots, ownership)
        self.in_backward = BackwardSubmission(rank, jobs, self.arrivals, self._vectors, ownership)
        partition = rank.partition
        self._zeros = torch.zeros((), dtype=rank.dtype, device=rank.device)
        # Not the partition's tiles: these end where blocks end, and squared norms must not depend on blocks.
        self._rectangles = [
            [_Rectangle.of(tile, partition, partition.tiles_by_slice[i]) for tile in tiles_of_slice(i, s)]
            for i, s in enumerate(partition.slices)
        ]

    def open(self, context: StepContext) -> None:
        """Begins a step; before its first gradient is routed."""
        self._jobs.open(context.number)
        self.arrivals.open()
        self.in_backward.open()
        self._provisional.open(context.loss_scale)

    def route(self, context: StepContext, index: int, gradient: Tensor) -> None:
        """Routes one slice's gradient; called in backward, in stream order behind its reduction.

        Args:
            context: inputs of the step.
            index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; of the whole step. It is not read after the work that this call enqueues.
        """
        complete = self._route_slice(context, index, gradient)
        if context.plan.submits_in_backward:
            self.in_backward.submit(complete, context)

    def gradient(self, index: int) -> Tensor:
        """A slice's gradient of the open step, zero if none has been routed; waits for the device.

        Returns:
            [slice.numel], model dtype, on the device or the host.
        """
        if index not in self.arrivals.arrived:
            return self._zeros.expand(self._rank.partition.slices[index].numel)
        if index in self._vectors:
            return self._vectors.gradient(index)
        # The copies to the slots.
        runtime_of(self._rank.device).synchronize()
        return torch.cat([slot for _, slot in self._slots.views_of_slice(index)])

    def finish(self, context: StepContext, accumulation: Accumulation) -> Tensor:
        """Routes the gradients of parameters that the last micro-batch did not use, after backward.

        Args:
            context: inputs of the step.
            accumulation: sums of earlier micro-batches.

        Returns:
            Squared norm of this rank's gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in accumulation.pending:
            self._route_slice(context, index, accumulation.take(index))
        for index in self.arrivals.missing:
            self._route_zeros(context, index)
        self._upload(context)
        self._jobs.acquire(range(len(self._rank.partition.blocks)), context.number)
        norms = self.arrivals.squared_norms
        norms += self._vectors.finish(self.arrivals.arrived, filled=self._jobs.submitted_in_backward)
        return add_up(norms) if norms else torch.zeros((), dtype=torch.float64, device=self._rank.device)

    def _route_slice(self, context: StepContext, index: int, gradient: Tensor) -> list[int]:
        """Routes a slice's gradient of the whole step; returns the blocks that are complete with it."""
        if index in self._vectors:
            self._vectors.keep(index, gradient)
            return self.arrivals.slice_complete(index)
        self._jobs.acquire(self._rank.partition.blocks_of_slice[index], context.number)
        for rectangle in self._rectangles[index]:
            self._route_rectangle(context, index, gradient, rectangle)
        complete = self.arrivals.slice_complete(index)
        self._upload(context)
        return complete

    def _route_rectangle(self, context: StepContext, index: int, gradient: Tensor, rectangle: _Rectangle) -> None:
        """Copies one rectangle to its destinations, measures it and updates its weights provisionally."""
        s, tile = self._rank.partition.slices[index], rectangle.tile
        column_norms = context.column_norms if s.is_matrix else None
        late = self._late_parts(context, rectangle) if tile.rows > 1 and self._provisional.applies_to(index) else []
        # Most slices are one rectangle.
        part = gradient if tile.numel == s.numel else gradient.narrow(0, tile.begin - s.begin, tile.numel)
        matrix = part.view(tile.rows, tile.width)
        destinations = self._destinations(rectangle)
        per_axis = column_norms is not None or bool(late)
        norms = self._rank.kernels.route(matrix, destinations, per_axis=per_axis, copies=self._d2h(matrix))
        self._rank.telemetry.traffic.d2h_bytes += matrix.nbytes
        self.arrivals.squared_norms.append(norms.parts)
        if column_norms is not None:
            column_norms.of_parameter(s.parameter).narrow(0, tile.first_column, tile.width).add_(norms.columns)
        if late:
            factors = self._provisional.measure(index, norms, context.groups[s.param_group])
            tiles = [self._tile_gradient(rectangle.parts[i], destinations[i], context.number) for i in late]
            with self._rank.telemetry.tracer.span("provisional update"):
                self._provisional.gradient(context.number, factors, matrix, tiles, context.schedule)

    def _late_parts(self, context: StepContext, rectangle: _Rectangle) -> list[int]:
        """Parts of a rectangle whose weights will lack a gradient in some forward pass, as indexes into `rectangle.parts`."""
        if context.plan.shows_exact_weights:
            return []
        blocks = (self._rank.partition.block_of_tile[part] for part in rectangle.parts)
        return [
            index
            for index, block in enumerate(blocks)
            if not (context.schedule.of_block(block).is_immediate or self._ownership.owns_entirely(block))
        ]

    def _route_zeros(self, context: StepContext, index: int) -> None:
        """A slice without any gradient in the step."""
        if index in self._vectors:
            return
        self._jobs.acquire(self._rank.partition.blocks_of_slice[index], context.number)
        for rectangle in self._rectangles[index]:
            for destination in self._destinations(rectangle):
                # From the device: in the order of its streams, the slot may still be read for an update that is reapplied.
                destination.slot.copy_(self._zeros.expand_as(destination.slot), non_blocking=True)
                for selection in destination.selections:
                    selection.target.zero_()
        self.arrivals.slice_complete(index)

    @contextmanager
    def _d2h(self, gradient: Tensor) -> Iterator[None]:
        """Context in which a gradient is copied to its slots."""
        with (
            self._rank.d2h.behind(reads=gradient),
            self._rank.telemetry.tracer.span("d2h copies", n_bytes=gradient.nbytes),
        ):
            yield

    def _destinations(self, rectangle: _Rectangle) -> list[Destination]:
        return [
            Destination(begin=begin, slot=self._slots.view(part), selections=self._ownership.selections(part))
            for part, begin in zip(rectangle.parts, rectangle.begins, strict=True)
        ]

    def _tile_gradient(self, part: int, destination: Destination, step: int) -> TileGradient:
        block = self._rank.partition.block_of_tile[part]
        return TileGradient(
            block=block,
            destination=destination,
            age=self._publisher.age(block, step),
            due_step=self._jobs.in_flight.next_due(block),
        )

    def _upload(self, context: StepContext) -> None:
        """Copies finished weights of slices whose gradients are there."""
        self._jobs.in_flight.poll(context.number, self.arrivals.take_new())
