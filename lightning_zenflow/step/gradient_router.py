"""What happens to a reduced gradient before its buffer is reused: accumulated, measured, gathered, handed to the slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, Tile, tiles_of_slice
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.provisional import ProvisionalStep, ProvisionalUpdate, ReapplyAfterPublish
from lightning_zenflow.kernels.base import Destination, Kernels
from lightning_zenflow.step.accumulation import Accumulation, new_accumulation
from lightning_zenflow.step.in_backward import BackwardSubmission
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.topk.selector import ColumnSquaredNorms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rectangle:
    """A rectangle of a slice that squared_norms are taken of, and the partition's tiles that it is cut into where blocks end."""

    tile: Tile
    parts: tuple[int, ...]
    """Indexes into `Partition.tiles`."""
    begins: tuple[int, ...]
    """Where each of them begins in the rectangle."""

    @classmethod
    def of(cls, tile: Tile, partition: Partition, parts: Sequence[int]) -> "_Rectangle":
        """Finds its parts among the slice's."""
        inside = [i for i in parts if tile.begin <= partition.tiles[i].begin < tile.end]
        return cls(tile=tile, parts=tuple(inside), begins=tuple(partition.tiles[i].begin - tile.begin for i in inside))

    def destinations(self, jobs: JobQueue, ownership: Ownership) -> list[Destination]:
        """Where its parts go in this step, but for what is not trained and lies in a block that has been handed over early."""
        return [
            Destination(begin=begin, slot=jobs.slot(part), selections=ownership.selections(part))
            for part, begin in zip(self.parts, self.begins, strict=True)
            if not jobs.was_submitted(part)
        ]


class GradientRouter:
    """Takes this rank's slices of reduced gradients, one optimizer step at a time.

    A parameter without a gradient in a step has the gradient zero in it, as under ZeRO-2 without offload: its moments decay.

    Args:
        partition: the rank's partition.
        jobs: where gradients go.
        early: hands over what is complete, where that may be before the step's end.
        small: handles small vectors together.
        ownership: which entries' gradients are kept on the device.
        provisional: what moves host-owned weights at once, if anything.
        kernels: passes over gradients.
        tracer: records the copies and the stand-in.
        traffic: where copied bytes are counted.
        device: where gradients come from.
        dtype: the model's type.
        accumulate_on: `ZenFlowConfig.accumulate_on`.
    """

    def __init__(
        self,
        partition: Partition,
        jobs: JobQueue,
        early: BackwardSubmission,
        small: VectorGradients,
        ownership: Ownership,
        provisional: ProvisionalUpdate | None,
        kernels: Kernels,
        tracer: Tracer,
        traffic: Traffic,
        *,
        device: torch.device,
        dtype: torch.dtype,
        accumulate_on: Literal["auto", "device", "host"],
    ) -> None:
        self._partition = partition
        self._jobs = jobs
        self._early = early
        self._small = small
        self._ownership = ownership
        self._provisional = provisional
        self._kernels = kernels
        self._tracer = tracer
        self._traffic = traffic
        # Not the partition's tiles: those are cut where blocks end, and squared_norms must not depend on blocks.
        parts: list[list[int]] = [[] for _ in partition.slices]
        for part, tile in enumerate(partition.tiles):
            parts[tile.slice].append(part)
        self._parts = parts
        self._rectangles = [
            [_Rectangle.of(tile, partition, parts[i]) for tile in tiles_of_slice(i, s)]
            for i, s in enumerate(partition.slices)
        ]
        self._device = device
        self._dtype = dtype
        self._accumulate_on = accumulate_on
        self._accumulation: Accumulation | None = None
        self._partial: set[int] = set()
        self._delivered: set[int] = set()
        self._passed: set[int] = set()  # delivered since the last early publish
        self._totals: list[Tensor] = []
        self.repeated = ReapplyAfterPublish(
            provisional, partition.numel * dtype.itemsize, lambda: jobs.schedule, traffic
        )
        """What the stand-in moves once more after a publish."""
        self.stand_in_needed = True
        """Whether the stand-in moves weights in this step: not if the exact ones are published at its end."""
        self.column_norms: ColumnSquaredNorms | None = None
        """Where column proxies are added up in steps that are followed by a selection."""

    def receive(self, slice_index: int, gradient: Tensor, *, step: int, last: bool) -> None:
        """Takes one slice's gradient; called in backward, in stream order behind its reduction.

        Args:
            slice_index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; may be changed in place, and is not read after what this call enqueues.
            step: number of the optimizer step that the gradient counts towards.
            last: whether this is the step's last micro-batch.
        """
        if not last:
            self._accumulate(slice_index, gradient)
            return
        if slice_index in self._partial:
            assert self._accumulation is not None
            gradient.add_(self._accumulation.kept(slice_index))
        before = len(self._totals)
        self._deliver(slice_index, gradient, step)
        self._early.delivered(slice_index, self._totals[before:])

    def finish(self, step: int) -> Tensor:
        """Ends a step's gradients.

        Returns:
            Sum of squares of this rank's gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in sorted(self._partial - self._delivered):
            assert self._accumulation is not None
            self._deliver(index, self._accumulation.kept(index), step)
        for index in range(len(self._partition.slices)):
            if index not in self._delivered:
                self._deliver(index, None, step)
        self._publish_early(step)
        self._totals += self._small.finish()
        totals = torch.stack(self._totals) if self._totals else torch.zeros(1, device=self._device)
        self._partial.clear()
        self._delivered.clear()
        self._totals.clear()
        return totals.double().sum()

    def _deliver(self, index: int, gradient: Tensor | None, step: int) -> None:
        """The slice's gradient of the whole step is known; None stands for zeros."""
        if not self._delivered:
            self._jobs.open(step)
        self._delivered.add(index)
        self._passed.add(index)
        if index in self._small:
            if gradient is not None:
                self._small.keep(index, gradient)
            return
        for rectangle in self._rectangles[index]:
            destinations = rectangle.destinations(self._jobs, self._ownership)
            if gradient is not None:
                self._take(index, gradient, rectangle, destinations, step)
                continue
            for destination in destinations:
                destination.slot.zero_()
                for selection in destination.selections:
                    selection.target.zero_()
        self._publish_early(step)

    def _publish_early(self, step: int) -> None:
        self._jobs.publish_in_backward(self._passed, step)
        self._passed.clear()

    def _take(
        self,
        index: int,
        gradient: Tensor,
        rectangle: _Rectangle,
        destinations: Sequence[Destination],
        step: int,
    ) -> None:
        """One rectangle of the slice: it goes where it has to, its norm, its column proxies if they are wanted, and the stand-in."""
        s, tile = self._partition.slices[index], rectangle.tile
        column_norms = self.column_norms if s.is_matrix else None
        moves = (
            self._provisional is not None and self.stand_in_needed and self._provisional.moves(index) and tile.rows > 1
        )
        # Most slices are one rectangle.
        part = gradient if tile.numel == s.numel else gradient.narrow(0, tile.begin - s.begin, tile.numel)
        matrix = part.view(tile.rows, tile.width)
        n_bytes = tile.numel * gradient.element_size()
        with self._tracer.span("d2h copies", n_bytes=n_bytes):
            squared_norms = self._kernels.route(matrix, destinations, per_axis=column_norms is not None or moves)
        self._traffic.d2h_bytes += n_bytes
        self._totals.append(squared_norms.total)
        if column_norms is not None and squared_norms.columns is not None:
            column_norms.of_parameter(s.parameter).narrow(0, tile.first_column, tile.width).add_(squared_norms.columns)
        if self._provisional is not None and moves:
            move = self._provisional.measure(index, squared_norms)
            with self._tracer.span("provisional update"):
                self._move(self._provisional, move, matrix, rectangle, destinations, step)

    def _move(
        self,
        provisional: ProvisionalUpdate,
        move: ProvisionalStep,
        matrix: Tensor,
        rectangle: _Rectangle,
        destinations: Sequence[Destination],
        step: int,
    ) -> None:
        """Moves weights now, and keeps what a publish will overwrite; what is overwritten at this step's end moves after that only."""
        due_steps = [self._jobs.next_due(part) for part in rectangle.parts]
        ages = [self._jobs.gradient_age(part, step) for part in rectangle.parts]
        if all(due is None for due in due_steps) and len(set(ages)) == 1:
            provisional.apply(move, 0, matrix, ages[0])
            return
        for part, destination, due, age in zip(rectangle.parts, destinations, due_steps, ages, strict=True):
            gradient = destination.part_of(matrix)
            if due is None or due > step:
                provisional.apply(move, destination.begin, gradient, age)
            if due is not None:
                self.repeated.keep(self._jobs.block_of(part), step, move, destination.begin, gradient, destination.slot)

    def _accumulate(self, index: int, gradient: Tensor) -> None:
        """Takes a gradient of a micro-batch that is not the step's last."""
        self._jobs.prepare()
        if self._accumulation is None:
            self._accumulation = new_accumulation(
                self._accumulate_on,
                self._partition,
                self._slots,
                self._traffic,
                device=self._device,
                dtype=self._dtype,
            )
        if index in self._partial:
            self._accumulation.add(index, gradient)
        else:
            self._accumulation.keep(index, gradient)
            self._partial.add(index)

    def _slots(self, index: int) -> list[tuple[int, Tensor]]:
        """For each part of a slice where it begins in the slice, and its part of the step's slot, flat."""
        tiles, begin = self._partition.tiles, self._partition.slices[index].begin
        return [(tiles[part].begin - begin, self._jobs.slot(part).view(-1)) for part in self._parts[index]]
