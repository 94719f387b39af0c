"""DeepSpeed's bookkeeping of parameters and partitions in our words. Reads `DeepSpeedZeroOptimizer`, changes nothing."""

from typing import Any

from torch import Tensor

from lightning_zenflow.core.partition import Slice, group_begins, row_length


def read_slices(zero_optimizer: Any) -> list[Slice]:
    """The slices of this rank's partition, ascending.

    Read from `params_in_partition` and `grad_position`, which holds for each of these parameters its group, where its part in the
    partition starts in the parameter and in the group's partition, and how many elements it has.
    """
    begins = group_begins(zero_optimizer.partition_size)
    slices = []
    for parameters in zero_optimizer.params_in_partition:
        for parameter in parameters:
            number = zero_optimizer.get_param_id(parameter)
            group, start, begin, numel = zero_optimizer.grad_position[number]
            if numel > 0:
                columns = row_length(parameter)
                slices.append(
                    Slice(
                        parameter=number,
                        param_group=group,
                        begin=begins[group] + begin,
                        start=start,
                        numel=numel,
                        columns=columns or 1,
                        is_matrix=columns > 0,
                    )
                )
    return slices


def parameters_in_order(zero_optimizer: Any) -> list[Tensor]:
    """All trained parameters of the model, in the order in which `Slice.parameter` counts them."""
    return [parameter for group in zero_optimizer.bit16_groups for parameter in group]


def shapes_by_name(zero_optimizer: Any) -> list[dict[str, tuple[int, ...]]]:
    """For each parameter group the shapes of its parameters by name, in the order in which they are trained and saved."""
    names = zero_optimizer.param_names
    return [{names[p]: tuple(p.shape) for p in group} for group in zero_optimizer.bit16_groups]
