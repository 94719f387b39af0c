"""Copies of ZeRO-Offload across PCIe, and the size of an arena, in bytes."""

import torch

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import STATE_BYTES, Block, Partition
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule, blocks_wanted
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes


def zero_offload_traffic(*, dtype_bytes: int, accumulate_grad_batches: int) -> tuple[int, int]:
    """Copies of ZeRO-Offload (DeepSpeed 0.19.8) in one optimizer step, in bytes per parameter.

    fp32 gradients go to the host (`async_inplace_copy_grad_to_fp32_buffer_from_gpu`), weights of the model's dtype to the device. With
    accumulation, the running sum goes to the host after each micro-batch and back for the next (`async_accumulate_grad_in_cpu_via_gpu`).

    Args:
        dtype_bytes: bytes of a weight and of a gradient.
        accumulate_grad_batches: micro-batches in an optimizer step.

    Returns:
        (device to host, host to device).
    """
    b, n = dtype_bytes, accumulate_grad_batches
    sums_d2h, sums_h2d = (b * n, b * (n - 1)) if n > 1 else (0, 0)
    return 4 + sums_d2h, b + sums_h2d


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
