"""Bytes that training moves and holds, by formula: of memory traffic, of copies across PCIe, of host memory. Pure Python."""

from collections.abc import Sequence

from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule

STATE_BYTES = 12
"""fp32 master weight and two fp32 moments."""


def replay_bytes(n_steps: int, dtype_bytes: int) -> int:
    """Memory traffic of one round of the worker, in bytes a parameter.

    Master and moments are read and written once, the gradients read, the weights written: 24 + b S + b. Where cores are few, arithmetic
    takes longer than that (`estimate.replay_core_s`).
    """
    return 24 + dtype_bytes * (n_steps + 1)


def cpu_adamw_bytes(dtype_bytes: int) -> float:
    """Memory traffic of one step of ZeRO-Offload's CPU part, in bytes a parameter.

    Three passes in DeepSpeed 0.19.8 (`DeepSpeedZeroOptimizer.step`): clipping reads and writes fp32 gradients, 8; AdamW reads four arrays
    and writes three, 28; the copy to the model's type, 4 + b. With b = 2, 42 bytes: 1.05 ns at 40 GB/s, where 1.01 were measured.
    """
    return 8 + 28 + 4 + dtype_bytes


def zero_offload_traffic(*, dtype_bytes: int, accumulate_grad_batches: int) -> tuple[int, int]:
    """What ZeRO-Offload of DeepSpeed 0.19.8 copies in an optimizer step, in bytes a parameter: (device to host, host to device).

    Down go fp32 gradients (`async_inplace_copy_grad_to_fp32_buffer_from_gpu`), up go weights of the model's type. With accumulation the
    running sum goes down after each micro-batch and comes back for the next one (`async_accumulate_grad_in_cpu_via_gpu`).

    Args:
        dtype_bytes: of a weight and of a gradient.
        accumulate_grad_batches: micro-batches in an optimizer step.
    """
    b, n = dtype_bytes, accumulate_grad_batches
    sums_down, sums_up = (b * n, b * (n - 1)) if n > 1 else (0, 0)
    return 4 + sums_down, b + sums_up


def arena_bytes_of(
    partition_numel: int, *, n_blocks: int, schedules: Sequence[UpdateSchedule], dtype_bytes: int
) -> float:
    """Host memory that one rank's arena has in use, but for headers and alignment: what `jobs.JobQueue.set_schedule` has the arena reserve.

    Args:
        partition_numel: parameters of the rank's partition.
        n_blocks: blocks of the partition, the largest S that may be used.
        schedules: every S and d that the run has used.
        dtype_bytes: b.
    """
    longest, lag = max(p.update_interval for p in schedules), max(p.publish_lag for p in schedules)
    n_slots = StaggeredSchedule(n_blocks=n_blocks, update_interval=longest, publish_lag=lag).n_slots
    n_buffers = max(
        StaggeredSchedule(
            n_blocks=n_blocks, update_interval=p.update_interval, publish_lag=p.publish_lag
        ).n_publish_buffers
        for p in schedules
    )
    slot_numel = -(-partition_numel // n_blocks)
    return STATE_BYTES * partition_numel + dtype_bytes * slot_numel * (n_slots + n_buffers)
