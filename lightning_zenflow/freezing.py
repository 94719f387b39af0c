"""Parameters that users freeze or unfreeze (`requires_grad`) while training goes on."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_zenflow.device_columns import Columns
from lightning_zenflow.partition import Partition, merge_ranges


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


def frozen_parameters(
    named: Iterable[tuple[str, Tensor]], groups: Iterable[Mapping[str, Sequence[Tensor]]]
) -> dict[str, Tensor]:
    """The parameters of an optimizer that require no gradient.

    Args:
        named: the model's parameters and their names.
        groups: the optimizer's parameter groups.
    """
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: p for name, p in named if id(p) in optimized and not p.requires_grad}


def refuse_unfrozen(frozen_at_setup: Mapping[str, Tensor]) -> None:
    """Says so where a parameter was unfrozen that DeepSpeed does not train.

    Raises:
        MisconfigurationException: names the parameter.
    """
    for name, parameter in frozen_at_setup.items():
        if parameter.requires_grad:
            raise MisconfigurationException(
                f"{name}.requires_grad=True: allowed is False for a parameter that was frozen when training was set up, since DeepSpeed"
                " trains those only that required gradients then; set it up trainable and freeze it in `on_train_start`"
            )
