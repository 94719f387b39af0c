"""Formulas for memory traffic, copies across PCIe and host memory, in bytes. Pure Python."""

from collections.abc import Sequence

from lightning_zenflow.schedule.candidates import with_changes
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule

STATE_BYTES = 12
"""Per parameter: fp32 master weight and two fp32 moments. Not imported: this module does without torch."""

MOMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Of each moment in the arena, by `moments_dtype`."""


def replay_bytes(n_steps: int, dtype_bytes: int, moment_bytes: int = 4) -> int:
    """Memory traffic of one job of the worker, in bytes per parameter: 24 + b S + b, or 16 + b S + b with bf16 moments.

    Master weights and moments are read and written once, gradients are read, weights are written. With few cores, arithmetic takes
    longer (`zenflow_cost.replay_core_s`).

    Args:
        n_steps: gradients that the job applies, a tentative one included.
        dtype_bytes: b.
        moment_bytes: of each moment.
    """
    return 2 * (4 + 2 * moment_bytes) + dtype_bytes * (n_steps + 1)


def cpu_adamw_bytes(dtype_bytes: int) -> float:
    """Memory traffic of the CPU in one step of ZeRO-Offload, in bytes per parameter.

    DeepSpeed 0.19.8 (`DeepSpeedZeroOptimizer.step`) makes three passes: clipping reads and writes fp32 gradients, 8; AdamW reads four
    arrays and writes three, 28; the copy to the model's dtype, 4 + b. At b = 2 these 42 bytes take 1.05 ns
    at 40 GB/s; 1.01 ns were measured.
    """
    return 8 + 28 + 4 + dtype_bytes


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
    partition_numel: int,
    *,
    n_blocks: int,
    schedules: Sequence[UpdateSchedule],
    dtype_bytes: int,
    owned_numel: float = 0.0,
    offload: bool = False,
    in_backward: bool = False,
    n_late: int = 0,
    moment_bytes: int = 4,
) -> float:
    """Host memory of one rank's arena, without headers and alignment.

    Args:
        partition_numel: parameters of the rank's partition.
        n_blocks: blocks of the partition.
        schedules: all S and d of the run.
        dtype_bytes: b.
        owned_numel: device-owned entries of the partition; their state is exported to a place of its own (`topk.state_export`).
        offload: whether it stays there; the next state of changing columns then has another place.
        in_backward: whether blocks may be submitted in backward.
        n_late: blocks of the tail, at most.
        moment_bytes: of each moment.
    """
    tail = frozenset(range(n_late))
    of_run = [
        StaggeredSchedule.of(p, n_blocks=n_blocks, in_backward=in_backward, tail=tail) for p in with_changes(schedules)
    ]
    n_slots = max(s.n_slots for s in of_run)
    n_buffers = max(s.n_publish_buffers for s in of_run[1:])
    slot_numel = -(-partition_numel // n_blocks)
    exported = STATE_BYTES * owned_numel * (2 if offload else 1)
    return (4 + 2 * moment_bytes) * partition_numel + exported + dtype_bytes * slot_numel * (n_slots + n_buffers)
