"""Slices of a rank's partition, read from DeepSpeed's bookkeeping: every parameter is cut into equal pieces, one for each rank."""

from typing import Any

import torch.distributed as dist

from lightning_zenflow.core.partition import Slice, group_begins


def read_slices(zero_optimizer: Any) -> list[Slice]:
    """Slices of this rank's partition, ascending. `Slice.param_group` is DeepSpeed's sub-group, each of which has a flat partition.

    A piece has the same length on every rank; behind the end of the parameter is padding, on the last ranks, which no slice has.

    Private attributes of `DeepSpeedZeroOptimizer_Stage3`: `fp16_groups` (parameters by sub-group) and `fp16_partitioned_groups_flat_numel`
    (elements of the flat partitions); of a parameter: `partition_numel` (of its piece), `ds_numel` and `ds_shape` (of the whole).
    """
    rank = dist.get_rank(group=zero_optimizer.dp_process_group)
    slices, number = [], 0
    begins = group_begins(zero_optimizer.fp16_partitioned_groups_flat_numel)
    for index, (sub_group, begin) in enumerate(zip(zero_optimizer.fp16_groups, begins, strict=True)):
        for parameter in sub_group:
            padded = parameter.partition_numel()
            start = rank * padded
            if (numel := min(padded, parameter.ds_numel - start)) > 0:
                place = {"param_group": index, "begin": begin, "start": start, "numel": numel}
                slices.append(Slice.of(parameter.ds_shape, parameter=number, **place))
            begin += padded
            number += 1
    return slices
