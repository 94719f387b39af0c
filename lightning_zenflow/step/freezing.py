"""Parameters that are frozen or unfrozen (`requires_grad`) while training goes on."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, merge_ranges
from lightning_zenflow.topk.state_export import Columns


class Freezing:
    """Record of the parameters that are trained at present. As under plain torch, a frozen parameter and its moments do not change.

    Args:
        parameters: parameters of the model that required gradients at setup, in the order in which `Slice.parameter` counts them.
    """

    def __init__(self, partition: Partition, parameters: Sequence[Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self._trained = self._followed = [True] * len(parameters)

    def update(self) -> bool:
        """Reads `requires_grad` again; returns whether it has changed since `followed`, the same on every rank."""
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        return self._trained != self._followed

    def followed(self) -> None:
        """Notes that everything follows the present flags."""
        self._followed = self._trained

    def state_dict(self) -> list[bool]:
        """For each parameter, whether it is trained, as of the last `update`."""
        return list(self._trained)

    def load_state_dict(self, state: Sequence[bool]) -> bool:
        """Inverse of `state_dict`; returns as `update`."""
        self._trained = list(state)
        return self._trained != self._followed

    def is_frozen(self, slice_index: int) -> bool:
        """Whether steps leave a slice alone, as of the last `update`."""
        return not self._trained[self._partition.slices[slice_index].parameter]

    def parameter_of(self, slice_index: int) -> Tensor:
        """The parameter that a slice is a part of."""
        return self._parameters[self._partition.slices[slice_index].parameter]

    def trained_slices(self) -> list[int]:
        """Slices that are not frozen, ascending."""
        return [index for index in range(len(self._partition.slices)) if not self.is_frozen(index)]

    def trained_part(self) -> Partition:
        """Partition with the ranges of trained parameters only."""
        trained = [self._partition.slices[index] for index in self.trained_slices()]
        return dataclasses.replace(self._partition, ranges=tuple(merge_ranges(trained)))

    def all_columns(self) -> list[Columns | None]:
        """As `of_slices`, for all columns of every parameter."""
        return self.of_slices([None] * len(self._parameters))

    def no_columns(self) -> list[Columns | None]:
        """As `of_slices`, for no column of any parameter."""
        return self.of_slices([self._none()] * len(self._parameters))

    def of_slices(self, columns: Sequence[Columns | None]) -> list[Columns | None]:
        """For each slice the columns of its parameter; no columns where it is frozen.

        Args:
            columns: for each parameter, columns over the whole row; None: all.
        """
        none = self._none() if self._parameters else None
        return [columns[s.parameter] if self._trained[s.parameter] else none for s in self._partition.slices]

    def _none(self) -> Columns:
        nothing = torch.empty(0, dtype=torch.int64)
        return Columns(device=nothing.to(self._parameters[0].device), host=nothing)
