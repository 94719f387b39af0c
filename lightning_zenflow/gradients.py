"""What happens to a reduced gradient before its buffer is reused: accumulated, measured, gathered, handed to the pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_zenflow.accumulation import Accumulation, new_accumulation
from lightning_zenflow.early_hand_over import EarlyHandOver
from lightning_zenflow.kernels import Destination, Kernels
from lightning_zenflow.ownership import Ownership
from lightning_zenflow.partition import Partition, Tile, tiles_of_slice
from lightning_zenflow.repeated_moves import RepeatedMoves
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.selector import ColumnEnergies
from lightning_zenflow.small_gradients import SmallGradients
from lightning_zenflow.stand_in import Move, StandIn
from lightning_zenflow.tracing import Tracer
from lightning_zenflow.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rectangle:
    """A rectangle of a slice that statistics are taken of, and the partition's tiles that it is cut into where blocks end."""

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

    def destinations(self, rounds: Rounds, ownership: Ownership) -> list[Destination]:
        """Where its parts go in this step, but for what is not trained and lies in a block that has been handed over early."""
        return [
            Destination(begin=begin, page=rounds.page(part), selections=ownership.selections(part))
            for part, begin in zip(self.parts, self.begins, strict=True)
            if not rounds.was_handed_over(part)
        ]


class GradientIntake:
    """Takes this rank's slices of reduced gradients, one optimizer step at a time.

    A parameter without a gradient in a step has the gradient zero in it, as under ZeRO-2 without offload: its moments decay.

    Args:
        partition: the rank's partition.
        rounds: where gradients go.
        early: hands over what is complete, where that may be before the step's end.
        small: handles small vectors together.
        ownership: which entries' gradients are kept on the device.
        stand_in: what moves host-owned weights at once, if anything.
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
        rounds: Rounds,
        early: EarlyHandOver,
        small: SmallGradients,
        ownership: Ownership,
        stand_in: StandIn | None,
        kernels: Kernels,
        tracer: Tracer,
        traffic: Traffic,
        *,
        device: torch.device,
        dtype: torch.dtype,
        accumulate_on: Literal["auto", "device", "host"],
    ) -> None:
        self._partition = partition
        self._rounds = rounds
        self._early = early
        self._small = small
        self._ownership = ownership
        self._stand_in = stand_in
        self._kernels = kernels
        self._tracer = tracer
        self._traffic = traffic
        # Not the partition's tiles: those are cut where blocks end, and statistics must not depend on blocks.
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
        self.repeated = RepeatedMoves(stand_in, partition.numel * dtype.itemsize, lambda: rounds.pace, traffic)
        """What the stand-in moves once more after a publish."""
        self.stand_in_needed = True
        """Whether the stand-in moves weights in this step: not if the exact ones are published at its end."""
        self.energies: ColumnEnergies | None = None
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
            self._rounds.open(step)
        self._delivered.add(index)
        self._passed.add(index)
        if index in self._small:
            if gradient is not None:
                self._small.keep(index, gradient)
            return
        for rectangle in self._rectangles[index]:
            destinations = rectangle.destinations(self._rounds, self._ownership)
            if gradient is not None:
                self._take(index, gradient, rectangle, destinations, step)
                continue
            for destination in destinations:
                destination.page.zero_()
                for selection in destination.selections:
                    selection.target.zero_()
        self._publish_early(step)

    def _publish_early(self, step: int) -> None:
        self._rounds.publish_early(self._passed, step)
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
        energies = self.energies if s.is_matrix else None
        moves = self._stand_in is not None and self.stand_in_needed and self._stand_in.moves(index) and tile.rows > 1
        # Most slices are one rectangle.
        part = gradient if tile.numel == s.numel else gradient.narrow(0, tile.begin - s.begin, tile.numel)
        matrix = part.view(tile.rows, tile.width)
        n_bytes = tile.numel * gradient.element_size()
        with self._tracer.span("copies down", n_bytes=n_bytes):
            statistics = self._kernels.take(matrix, destinations, directions=energies is not None or moves)
        self._traffic.down_bytes += n_bytes
        self._totals.append(statistics.total)
        if energies is not None and statistics.columns is not None:
            energies.of_parameter(s.parameter).narrow(0, tile.first_column, tile.width).add_(statistics.columns)
        if self._stand_in is not None and moves:
            move = self._stand_in.measure(index, statistics)
            with self._tracer.span("provisional update"):
                self._move(self._stand_in, move, matrix, rectangle, destinations, step)

    def _move(
        self,
        stand_in: StandIn,
        move: Move,
        matrix: Tensor,
        rectangle: _Rectangle,
        destinations: Sequence[Destination],
        step: int,
    ) -> None:
        """Moves weights now, and keeps what a publish will overwrite; what is overwritten at this step's end moves after that only."""
        due_steps = [self._rounds.next_due(part) for part in rectangle.parts]
        ages = [self._rounds.gradient_age(part, step) for part in rectangle.parts]
        if all(due is None for due in due_steps) and len(set(ages)) == 1:
            stand_in.apply(move, 0, matrix, ages[0])
            return
        for part, destination, due, age in zip(rectangle.parts, destinations, due_steps, ages, strict=True):
            gradient = destination.part_of(matrix)
            if due is None or due > step:
                stand_in.apply(move, destination.begin, gradient, age)
            if due is not None:
                self.repeated.keep(
                    self._rounds.block_of(part), step, move, destination.begin, gradient, destination.page
                )

    def _accumulate(self, index: int, gradient: Tensor) -> None:
        """Takes a gradient of a micro-batch that is not the step's last."""
        self._rounds.prepare()
        if self._accumulation is None:
            self._accumulation = new_accumulation(
                self._accumulate_on,
                self._partition,
                self._pages,
                self._traffic,
                device=self._device,
                dtype=self._dtype,
            )
        if index in self._partial:
            self._accumulation.add(index, gradient)
        else:
            self._accumulation.keep(index, gradient)
            self._partial.add(index)

    def _pages(self, index: int) -> list[tuple[int, Tensor]]:
        """For each part of a slice where it begins in the slice, and its part of the step's page, flat."""
        tiles, begin = self._partition.tiles, self._partition.slices[index].begin
        return [(tiles[part].begin - begin, self._rounds.page(part).view(-1)) for part in self._parts[index]]
