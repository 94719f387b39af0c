"""Parameters that users freeze or unfreeze (`requires_grad`) while training goes on."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, merge_ranges
from lightning_zenflow.topk.columns import Columns


class Freezing:
    """Which parameters are trained at present. A frozen one stays as it is, and so do its moments, as under plain torch.

    Args:
        partition: the rank's partition.
        parameters: all trained parameters of the model, in the order in which `Slice.parameter` counts them.
    """

    def __init__(self, partition: Partition, parameters: Sequence[Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self._trained = [True] * len(parameters)

    def update(self) -> bool:
        """Reads `requires_grad` anew; whether it changed anywhere in the model, hence the same on every rank."""
        before, self._trained = self._trained, [parameter.requires_grad for parameter in self._parameters]
        return self._trained != before

    def is_frozen(self, parameter: int) -> bool:
        """Whether the step leaves a parameter (by its number) alone, as it was when `update` was called."""
        return not self._trained[parameter]

    def trained_part(self) -> Partition:
        """The partition with the ranges of trained parameters only; all else is as it was."""
        trained = [s for s in self._partition.slices if self._trained[s.parameter]]
        return dataclasses.replace(self._partition, ranges=merge_ranges(trained))

    def of_slices(self, columns: Sequence[Columns | None]) -> list[Columns | None]:
        """For each slice the columns of its parameter; none at all where it is frozen.

        Args:
            columns: for each parameter, the columns over the whole row; None means all.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        none = Columns(device=nothing.to(self._parameters[0].device), host=nothing) if self._parameters else None
        return [columns[s.parameter] if self._trained[s.parameter] else none for s in self._partition.slices]
