"""Size of an arena, in bytes."""

import torch

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import STATE_BYTES, Block, Partition
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule, blocks_wanted
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes


def arena_bytes_of(
    numel: int, config: ZenFlowConfig, schedule: UpdateSchedule, *, dtype_bytes: int, owned_numel: float
) -> int:
    """Host memory of one rank's arena: its own layout, of a partition without padding.

    Args:
        numel: parameters of the rank's partition.
        config: ZenFlow's keys.
        schedule: S and d.
        dtype_bytes: b.
        owned_numel: device-owned entries of the partition; their state is exported to a place of its own (`topk.state_export`).
    """
    in_backward = config.submits_in_backward
    n_blocks = blocks_wanted(config.update_intervals, in_backward=in_backward, numel=numel)
    length = -(-numel // n_blocks)
    blocks = [Block(begin=i, end=min(i + length, numel), tiles=()) for i in range(0, numel, length)]
    partition = Partition(slices=(), tiles=(), blocks=tuple(blocks), ranges=(), group_begins=(0,), numel=numel)
    staggered = StaggeredSchedule.of(schedule, n_blocks=n_blocks, in_backward=in_backward)
    sizes = ArenaSizes(
        n_param_groups=1,
        n_step_records=staggered.n_step_records,
        n_slots=staggered.n_slots,
        n_publish_buffers=staggered.n_publish_buffers,
        dtype=torch.bfloat16 if dtype_bytes == 2 else torch.float32,
        moments_dtype=getattr(torch, config.moments_dtype),
        export_bytes=round(STATE_BYTES * owned_numel),
    )
    return arena_bytes(partition, sizes)
