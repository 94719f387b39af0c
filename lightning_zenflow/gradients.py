"""What happens to a reduced gradient before its buffer is reused: accumulated, measured, gathered, handed to the pages."""

import torch
from torch import Tensor

from lightning_zenflow.ownership import Ownership
from lightning_zenflow.partition import Partition, Tile
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.selection import column_energy
from lightning_zenflow.selector import ColumnEnergies
from lightning_zenflow.stand_in import StandIn


class GradientIntake:
    """Takes this rank's slices of reduced gradients, one optimizer step at a time.

    A parameter without a gradient in a step has the gradient zero in it, as under ZeRO-2 without offload: its moments decay.

    Args:
        partition: the rank's partition.
        rounds: where gradients go.
        ownership: which entries' gradients are kept on the device.
        stand_in: what moves host-owned weights at once, if anything.
        device: where gradients come from.
        dtype: the model's type.
    """

    def __init__(
        self,
        partition: Partition,
        rounds: Rounds,
        ownership: Ownership,
        stand_in: StandIn | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._partition = partition
        self._rounds = rounds
        self._ownership = ownership
        self._stand_in = stand_in
        self._tiles_of_slice: list[list[Tile]] = [[] for _ in partition.slices]
        for tile in partition.tiles:
            self._tiles_of_slice[tile.slice].append(tile)
        self._device = device
        self._dtype = dtype
        self._accumulated: Tensor | None = None
        self._partial: set[int] = set()
        self._delivered: set[int] = set()
        self._norms: list[Tensor] = []
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
        if slice_index in self._partial:
            kept = self._kept(slice_index)
            gradient = kept.add_(gradient) if not last else gradient.add_(kept)
        elif not last:
            self._kept(slice_index).copy_(gradient)
            self._partial.add(slice_index)
        if last:
            self._deliver(slice_index, gradient, step)

    def finish(self, step: int) -> Tensor:
        """Ends a step's gradients.

        Returns:
            Sum of squares of this rank's gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in sorted(self._partial - self._delivered):
            self._deliver(index, self._kept(index), step)
        for index in range(len(self._partition.slices)):
            if index not in self._delivered:
                self._deliver(index, None, step)
        norms = torch.stack(self._norms) if self._norms else torch.zeros(1, device=self._device)
        self._partial.clear()
        self._delivered.clear()
        self._norms.clear()
        return norms.double().square().sum()

    def _deliver(self, index: int, gradient: Tensor | None, step: int) -> None:
        """The slice's gradient of the whole step is known; None stands for zeros."""
        if not self._delivered:
            self._rounds.open(step)
        self._delivered.add(index)
        self._rounds.fill(index, gradient)
        self._ownership.gather_gradient(index, gradient)
        if gradient is not None:
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
            if self.energies is not None:
                self._add_energy(self.energies, index, gradient)
            if self._stand_in is not None and self.stand_in_needed:
                self._stand_in.apply(index, gradient)

    def _add_energy(self, energies: ColumnEnergies, index: int, gradient: Tensor) -> None:
        s = self._partition.slices[index]
        if not s.is_matrix:
            return
        of_parameter = energies.of_parameter(s.parameter)
        for tile in self._tiles_of_slice[index]:
            rectangle = gradient.narrow(0, tile.begin - s.begin, tile.numel).view(tile.rows, tile.width)
            of_parameter.narrow(0, tile.first_column, tile.width).add_(column_energy(rectangle))

    def _kept(self, index: int) -> Tensor:
        """Where a slice's gradient is added up over micro-batches: on the device, in the model's type, allocated on first use."""
        if self._accumulated is None:
            self._accumulated = torch.empty(self._partition.numel, dtype=self._dtype, device=self._device)
        s = self._partition.slices[index]
        return self._accumulated.narrow(0, s.begin, s.numel)
