"""Parameters that are frozen or unfrozen (`requires_grad`) while training goes on."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, merge_ranges
from lightning_zenflow.offload.columns import Columns


class Freezing:
    """Record of the parameters that are trained at present. As under plain torch, a frozen parameter and its moments do not change.

    Args:
        parameters: parameters of the model that required gradients at setup, in the order in which `Slice.parameter` counts them.

    Attributes:
        trained: for each parameter, whether it is trained, as of the last `update`.
    """

    def __init__(self, partition: Partition, parameters: Sequence[Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self.trained = self._followed = [True] * len(parameters)

    def update(self, trained: Sequence[bool] | None = None) -> bool:
        """Reads `requires_grad` again, or takes other flags; returns whether they have changed since `followed`, alike on every rank."""
        self.trained = [p.requires_grad for p in self._parameters] if trained is None else list(trained)
        return self.trained != self._followed

    def followed(self) -> None:
        """Notes that everything follows the present flags."""
        self._followed = self.trained

    def parameter_of(self, slice_index: int) -> Tensor:
        """The parameter that a slice is a part of."""
        return self._parameters[self._partition.slices[slice_index].parameter]

    def trained_slices(self) -> list[int]:
        """Slices that are not frozen, ascending."""
        return [index for index, s in enumerate(self._partition.slices) if self.trained[s.parameter]]

    def trained_part(self) -> Partition:
        """Partition with the ranges of trained parameters only."""
        trained = [self._partition.slices[index] for index in self.trained_slices()]
        return dataclasses.replace(self._partition, ranges=tuple(merge_ranges(trained)))

    def no_columns(self) -> list[Columns]:
        """For each parameter, no column."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return [Columns(device=none.to(p.device), host=none) for p in self._parameters[:1]] * len(self._parameters)

    def of_slices(self, columns: Sequence[Columns | None] | None = None) -> list[Columns | None]:
        """For each slice the columns of its parameter; no columns where it is frozen.

        Args:
            columns: for each parameter, columns over the whole row; None, alone or in their place: all.
        """
        columns, none = columns or [None] * len(self._parameters), self.no_columns()
        return [(columns if self.trained[s.parameter] else none)[s.parameter] for s in self._partition.slices]
