"""Slices of a rank's partition, read from DeepSpeed's bookkeeping."""

from collections.abc import Sequence
from typing import Any

from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from lightning_zenflow.core.partition import Slice, group_begins
from lightning_zenflow.engine.flat_layout import FlatLayout


def read_slices(zero_optimizer: Any) -> list[Slice]:
    """Slices of this rank's partition, ascending.

    Private attributes of `DeepSpeedZeroOptimizer`: `params_in_partition` (parameters with a part in the partition, by group) and
    `grad_position` (for each of them its group, the first element of the part in the parameter and in the group's partition, and its
    number of elements).
    """
    begins = group_begins(zero_optimizer.partition_size)
    slices = []
    for parameters in zero_optimizer.params_in_partition:
        for parameter in parameters:
            number = zero_optimizer.get_param_id(parameter)
            group, start, begin, numel = zero_optimizer.grad_position[number]
            if numel > 0:
                place = {"param_group": group, "begin": begins[group] + begin, "start": start, "numel": numel}
                slices.append(Slice.of(parameter.shape, parameter=number, **place))
    return slices


def parameters_in_order(zero_optimizer: Any) -> list[Tensor]:
    """Trained parameters of the model, in the order in which `Slice.parameter` counts them."""
    return [parameter for group in zero_optimizer.bit16_groups for parameter in group]


def flat_layouts(zero_optimizer: Any, groups: Sequence[Sequence[Tensor]]) -> list[FlatLayout]:
    """The layout of each parameter group, if its flat buffer has the parameters in the order of `groups`."""
    names = zero_optimizer.param_names
    return [
        FlatLayout.of({names[p]: p.numel() for p in group}, [0] * len(group), partition_numel=numel)
        for group, numel in zip(groups, zero_optimizer.partition_size, strict=True)
    ]


def fragments(layouts: Sequence[FlatLayout], rank: int) -> list[dict[str, Any]]:
    """For each parameter group the places of the parameters' parts on a rank, which DeepSpeed makes universal checkpoints by."""
    found = []
    for layout in layouts:
        parts = {name: layout.part_of(name, rank) for name in layout.places}
        found.append(
            {n: fragment_address(numel=end - begin, start=begin) for n, (begin, end) in parts.items() if begin < end}
        )
    return found
