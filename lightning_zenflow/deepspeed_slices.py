"""DeepSpeed's bookkeeping of parameters and partitions in our words. Reads `DeepSpeedZeroOptimizer`, changes nothing."""

from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_zenflow.partition import Slice, group_begins


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


def row_length(parameter: Tensor) -> int:
    """Elements in a row of the parameter's [out, rest] view; 0 if it has no columns: fewer than two dimensions, or no elements."""
    return parameter.numel() // parameter.shape[0] if parameter.dim() > 1 and parameter.numel() > 0 else 0


def parameters_in_order(zero_optimizer: Any) -> list[Tensor]:
    """All trained parameters of the model, in the order in which `Slice.parameter` counts them."""
    return [parameter for group in zero_optimizer.bit16_groups for parameter in group]


def shapes_by_name(zero_optimizer: Any) -> list[dict[str, tuple[int, ...]]]:
    """For each parameter group the shapes of its parameters by name, in the order in which they are trained and saved."""
    names = zero_optimizer.param_names
    return [{names[p]: tuple(p.shape) for p in group} for group in zero_optimizer.bit16_groups]


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses what only DeepSpeed's engine can know; everything else was refused with the configuration.

    Raises:
        MisconfigurationException: names the feature.
    """
    refused = {
        "mixture of experts": zero_optimizer.has_moe_layers,
        "model parallelism": zero_optimizer.model_parallel_world_size > 1,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "master weights or gradients in half precision": zero_optimizer.low_precision_master_weights_and_grads,
        "torch_autocast": zero_optimizer.torch_autocast_gradscaler is not None,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    for feature, present in refused.items():
        if present:
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}")
