"""What a training costs on a machine that is not at hand: memory, traffic and time, from a model's shapes and four numbers. Pure Python.

Three ways to train are compared: ZeRO-2 without offload, DeepSpeed's ZeRO-Offload (ZeRO-2 with the optimizer on the host), and ZenFlow. P
is the number of trained parameters, N the number of GPUs; every rank updates a partition of P / N parameters. b is the size of an
element of the model's type in bytes.

What the cost model takes from where stands at each function; docs/estimate.md says what it leaves out. 1 GB is 1e9 bytes.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import (
    STATE_BYTES,
    arena_bytes_of,
    cpu_adamw_bytes,
    replay_bytes,
    zero_offload_traffic,
)
from lightning_zenflow.estimate.shapes import ModelShapes
from lightning_zenflow.estimate.simulation import simulate
from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.staggered import UpdateSchedule, blocks_wanted
from lightning_zenflow.zero.config import LARGEST_BUCKET, bucket_size

BACKWARD_SHARE = 2 / 3
"""Of a step's time: a backward pass computes two matrix products for each one of the forward pass."""

_GB = 1e9

_SIMULATED_STEPS, _SETTLED_STEPS = 1000, 256

_NEGLIGIBLE = 0.02
"""Share of a step below which waiting is not called a limit; the one up to which `auto` stays."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware."""

    gpus: int
    """Over all hosts, an integer >= 1."""
    gpu_mem: float
    """Memory of one GPU in GB, > 0."""
    pcie: float
    """What one GPU copies from or to pinned host memory in GB/s, each way, > 0."""
    cpu_bw: float
    """Memory bandwidth of one host in GB/s (STREAM triad), shared by its ranks, > 0."""
    gpus_per_host: int = 8
    """An integer >= 1."""
    cpu_cores: int | None = None
    """Physical cores of one host, an integer >= 1; None: at least one for each 10 GB/s of `cpu_bw`, so that memory limits the worker."""
    host_mem: float | None = None
    """Memory of one host in GB, > 0; None: not known."""

    def __post_init__(self) -> None:
        """Refuses what is not allowed."""
        _check_integer("gpus", self.gpus)
        _check_integer("gpus_per_host", self.gpus_per_host)
        if self.cpu_cores is not None:
            _check_integer("cpu_cores", self.cpu_cores)
        for key, value in (("gpu_mem", self.gpu_mem), ("pcie", self.pcie), ("cpu_bw", self.cpu_bw)):
            _check_positive(key, value)
        if self.host_mem is not None:
            _check_positive("host_mem", self.host_mem)

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share a host's memory, on the fullest one."""
        return min(self.gpus, self.gpus_per_host)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training."""

    model: ModelShapes
    step_ms: float
    """Time of an optimizer step of ZeRO-2 without offload in ms, > 0: all micro-batches, the ranks' communication, AdamW on the GPU."""
    dtype_bytes: int = 2
    """b, bytes of a weight and of a gradient: 2 (bf16, fp16) or 4 (fp32)."""
    accumulate_grad_batches: int = 1
    """Micro-batches in an optimizer step, an integer >= 1."""
    clips: bool = True
    """Whether gradients are clipped by norm, so that no gradient can be applied before the last one is known."""
    reduce_bucket_size: int | None = None
    """Elements of one of DeepSpeed's two gradient buckets, an integer >= 1; None: that of Lightning's DeepSpeedStrategy, for ZenFlow
    `buckets.bucket_size`."""

    def __post_init__(self) -> None:
        """Refuses what is not allowed."""
        _check_positive("step_ms", self.step_ms)
        if self.dtype_bytes not in (2, 4):
            raise ConfigValueError(f"dtype_bytes={self.dtype_bytes!r}: allowed is 2 or 4", "dtype_bytes")
        _check_integer("accumulate_grad_batches", self.accumulate_grad_batches)
        if self.reduce_bucket_size is not None:
            _check_integer("reduce_bucket_size", self.reduce_bucket_size)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one way to train takes."""

    device_bytes: int
    """Of one GPU, at the highest point but for activations, which are the user's."""
    host_bytes: int
    """Of the fullest host, page-locked: all of its ranks."""
    d2h_bytes: int
    """From one GPU to the host in one step."""
    h2d_bytes: int
    """From the host to one GPU in one step."""
    cpu_s: float
    """What one rank's part of the CPU works in a step, all ranks of the host working at the same time."""
    copy_s: float
    """What a step is longer for copies across PCIe that nothing hides."""
    wait_s: float
    """What a step is longer because it waits for the CPU."""
    step_s: float
    """Mean time of a step."""
    fits_device: bool
    fits_host: bool | None
    """None: the host's memory is not known."""

    @property
    def fits(self) -> bool:
        """Whether there is no memory known to be too small."""
        return self.fits_device and self.fits_host is not False


@dataclass(frozen=True, kw_only=True)
class CostComparison:
    """The comparison."""

    machine: Machine
    workload: Workload
    none: Cost
    """ZeRO-2 without offload."""
    zero_offload: Cost
    zenflow: Cost
    schedule: UpdateSchedule
    """S and d that ZenFlow settles at."""
    fastest: Cost
    """ZenFlow under the fastest S and d that the configuration allows, fixed: `auto` takes the least stale whose CPU work hides, whatever
    is copied."""
    fastest_pace: UpdateSchedule
    """Of those that take no more than 2 % longer than the fastest, the least stale."""
    limit: Literal["device memory", "host memory", "PCIe", "CPU", "nothing"]
    """What keeps ZenFlow from training as fast as without offload."""


def estimate(workload: Workload, machine: Machine, config: ZenFlowConfig | None = None) -> CostComparison:
    """Predicts memory, traffic and time of a step.

    Args:
        workload: what is trained.
        machine: what on.
        config: ZenFlow's; its defaults if None.

    Raises:
        ConfigValueError: there are more GPUs than parameters.
    """
    config = config or ZenFlowConfig()
    if workload.model.numel < machine.gpus:
        allowed = f"an integer from 1 to the number of parameters, {workload.model.numel}"
        raise ConfigValueError(f"gpus={machine.gpus}: allowed is {allowed}", "gpus")
    zenflow, schedule = _zenflow(workload, machine, config)
    fixed = [
        _zenflow(workload, machine, dataclasses.replace(config, update_interval=s, publish_lag=d))
        for s in config.update_intervals
        for d in config.publish_lags
    ]
    shortest_s = min(cost.step_s for cost, _ in fixed)
    fastest, fastest_pace = next((c, p) for c, p in fixed if c.step_s <= (1 + _NEGLIGIBLE) * shortest_s)
    return CostComparison(
        machine=machine,
        workload=workload,
        none=_no_offload(workload, machine),
        zero_offload=_zero_offload(workload, machine),
        zenflow=zenflow,
        schedule=schedule,
        fastest=fastest,
        fastest_pace=fastest_pace,
        limit=_limit(zenflow),
    )


def _no_offload(workload: Workload, machine: Machine) -> Cost:
    """ZeRO-2: replicated weights; master, moments and reduced gradients of the partition; in the optimizer's step an fp32 copy of these.

    By then the buckets are free (`DeepSpeedZeroOptimizer.step` and `_release_ipg_buffers`, DeepSpeed 0.19.8).
    """
    b, partition = workload.dtype_bytes, _partition_numel(workload, machine)
    in_backward = _bucket_bytes(workload)
    in_step = 4 * partition if b < 4 else 0
    return _cost(
        machine,
        device_bytes=_weight_bytes(workload) + (STATE_BYTES + b) * partition + max(in_backward, in_step),
        step_s=workload.step_ms / 1e3,
    )


def _zero_offload(workload: Workload, machine: Machine) -> Cost:
    """ZeRO-Offload of DeepSpeed 0.19.8 at its best: pinned memory, and gradients copied while backward goes on.

    The step waits for the CPU, and for the weights. On the host are master, moments, fp32 gradients and the weights' buffer, and the
    running sum; on the device, besides weights and buckets, a buffer of the size of the largest parameter.
    """
    b, partition = workload.dtype_bytes, _partition_numel(workload, machine)
    n = workload.accumulate_grad_batches
    down, up = zero_offload_traffic(dtype_bytes=b, accumulate_grad_batches=n)
    backward_s = BACKWARD_SHARE * workload.step_ms / 1e3
    in_backward_s = (down + up - b) * partition / (machine.pcie * _GB)
    copy_s = max(0.0, in_backward_s - backward_s) + b * partition / (machine.pcie * _GB)
    cpu_s = cpu_adamw_bytes(b) * partition / _rank_bandwidth(machine)
    return _cost(
        machine,
        device_bytes=_weight_bytes(workload) + _bucket_bytes(workload) + b * workload.model.largest_numel,
        rank_host_bytes=(STATE_BYTES + 4 + b + (b if n > 1 else 0)) * partition,
        d2h_bytes=down * partition,
        h2d_bytes=up * partition,
        cpu_s=cpu_s,
        copy_s=copy_s,
        wait_s=cpu_s,
        step_s=workload.step_ms / 1e3 + copy_s + cpu_s,
    )


def _zenflow(workload: Workload, machine: Machine, config: ZenFlowConfig) -> tuple[Cost, UpdateSchedule]:
    """This package: the time line is simulated with the `auto` that decides in training, and the steps after it has settled are read.

    Gradients go down during (the last micro-batch's) backward, on DeepSpeed's stream for reduction; what takes longer delays the step.
    Published weights, 1/S of them a step, come up in backward where there is a lag, or where nothing is clipped and each gradient goes to
    the worker as it arrives (S = 1, d = 0), but for one block whose round may be done too late; elsewhere nothing hides them. The worker
    reads and writes the host's memory while these copies do, so they share its bandwidth; where it has few cores, its arithmetic takes
    longer. The device's own part, the stand-in and the selected columns' AdamW, is taken to need as long as the AdamW of all columns that
    it replaces. With `accumulate_on: host` sums of micro-batches cross PCIe in both per_axis, on the training's own stream; "auto" is
    taken for the device. Gradients that the stand-in repeats after a publish stay on the device where it has room, and come back over PCIe
    elsewhere.
    """
    b, partition = workload.dtype_bytes, _partition_numel(workload, machine)
    early = config.submits_in_backward and not workload.clips
    n_blocks = blocks_wanted(config.update_intervals, early=early)
    upload_s = b * partition / (machine.pcie * _GB)
    last_backward_s = BACKWARD_SHARE * workload.step_ms / 1e3 / workload.accumulate_grad_batches
    late_s = max(0.0, b * partition / (machine.pcie * _GB) - last_backward_s)
    auto = SchedulePolicy(config.update_intervals, config.publish_lags, hides_in_backward=early)
    sums = workload.accumulate_grad_batches - 1 if config.accumulate_on == "host" else 0

    buckets = _bucket_bytes(workload, bucket_size(workload.model.numel))
    device_bytes = _weight_bytes(workload) + buckets + _zenflow_device_bytes(workload, machine, config)

    def repeated_bytes(schedule: UpdateSchedule) -> float:
        provisional = config.prediction.moves
        return provisional * b * partition * schedule.publish_lag / schedule.update_interval

    def kept_bytes(schedule: UpdateSchedule) -> float:
        repeated = repeated_bytes(schedule)
        return repeated if device_bytes + repeated <= machine.gpu_mem * _GB else 0.0

    def copy_s(schedule: UpdateSchedule) -> float:
        read_back_s = (repeated_bytes(schedule) - kept_bytes(schedule)) / (machine.pcie * _GB)
        hidden = schedule.publish_lag > 0 or (early and schedule.update_interval == 1)
        at_the_end = 1 / n_blocks if hidden else 1 / schedule.update_interval
        return late_s + upload_s * at_the_end + 2 * sums * upload_s + read_back_s

    cores = _worker_cores(machine, config)

    def round_s(step: int, n_steps: int) -> float:
        traffic = replay_bytes(n_steps, b) + b * (n_steps + 1)
        arithmetic_s = 0.0 if cores is None else replay_core_s(n_steps) / cores
        return max(traffic / _rank_bandwidth(machine), arithmetic_s) * partition / n_blocks

    steps = simulate(
        auto,
        n_steps=_SIMULATED_STEPS,
        n_blocks=n_blocks,
        device_s=lambda step: workload.step_ms / 1e3 + copy_s(auto.schedule),
        round_s=round_s,
        early_share=last_backward_s / (workload.step_ms / 1e3) if early else 0.0,
        # It is an embedding mostly, whose gradient is the last.
        last_share=min(0.9, workload.model.largest_numel / workload.model.numel),
    )
    settled = steps[-_SETTLED_STEPS:]
    schedule = settled[-1].schedule
    schedules = sorted({s.schedule for s in steps})
    cost = _cost(
        machine,
        device_bytes=device_bytes + max(kept_bytes(p) for p in schedules),
        rank_host_bytes=arena_bytes_of(partition, n_blocks=n_blocks, schedules=schedules, dtype_bytes=b),
        d2h_bytes=b * partition * (1 + sums),
        h2d_bytes=b * partition * (1 / schedule.update_interval + sums)
        + repeated_bytes(schedule)
        - kept_bytes(schedule),
        cpu_s=sum(s.worker_s for s in settled) / len(settled),
        copy_s=copy_s(schedule),
        wait_s=sum(s.stall_s for s in settled) / len(settled),
        step_s=sum(s.device_s + s.stall_s for s in settled) / len(settled),
    )
    return cost, schedule


def replay_core_s(n_steps: int) -> float:
    """What the arithmetic of one round takes one core, in seconds a parameter.

    The design's replay loop needed 0.60, 0.67 and 0.93 ns a parameter for S = 1, 2, 4 on two cores, about 0.5 + 0.1 S
    (`auto_schedule.relative_cost`). It is assumed that the line goes on beyond S = 4.
    """
    return (1.0 + 0.2 * n_steps) * 1e-9


def _worker_cores(machine: Machine, config: ZenFlowConfig) -> float | None:
    """Cores of one rank's worker, as `affinity.worker_cores` deals them out; None: enough."""
    if isinstance(config.worker_cores, int):
        return config.worker_cores
    if not isinstance(config.worker_cores, str):
        return len(config.worker_cores) / machine.ranks_per_host
    if machine.cpu_cores is None:
        return None
    of_rank = machine.cpu_cores / machine.ranks_per_host
    return max(1.0, of_rank - round(config.pt_reserved_cores_perc * of_rank))


def _zenflow_device_bytes(workload: Workload, machine: Machine, config: ZenFlowConfig) -> float:
    """State and gradients of the selected columns, the stand-in's row and column floats, accumulated gradients.

    The stand-in works in place (`triton_kernels`).
    """
    b, partition = workload.dtype_bytes, _partition_numel(workload, machine)
    n_bytes = (STATE_BYTES + b) * workload.model.device_owned_numel(config.topk_ratio) / machine.gpus
    if config.prediction.moves:
        n_bytes += 4 * workload.model.statistics_numel / machine.gpus
    if workload.accumulate_grad_batches > 1:
        n_bytes += b * (min(workload.model.largest_numel, partition) if config.accumulate_on == "host" else partition)
    return n_bytes


def _cost(
    machine: Machine,
    *,
    device_bytes: float,
    step_s: float,
    rank_host_bytes: float = 0.0,
    d2h_bytes: float = 0.0,
    h2d_bytes: float = 0.0,
    cpu_s: float = 0.0,
    copy_s: float = 0.0,
    wait_s: float = 0.0,
) -> Cost:
    host_bytes = rank_host_bytes * machine.ranks_per_host
    return Cost(
        device_bytes=round(device_bytes),
        host_bytes=round(host_bytes),
        d2h_bytes=round(d2h_bytes),
        h2d_bytes=round(h2d_bytes),
        cpu_s=cpu_s,
        copy_s=copy_s,
        wait_s=wait_s,
        step_s=step_s,
        fits_device=device_bytes <= machine.gpu_mem * _GB,
        fits_host=None if machine.host_mem is None else host_bytes <= machine.host_mem * _GB,
    )


def _limit(zenflow: Cost) -> Literal["device memory", "host memory", "PCIe", "CPU", "nothing"]:
    if not zenflow.fits_device:
        return "device memory"
    if zenflow.fits_host is False:
        return "host memory"
    if max(zenflow.wait_s, zenflow.copy_s) <= _NEGLIGIBLE * zenflow.step_s:
        return "nothing"
    return "CPU" if zenflow.wait_s > zenflow.copy_s else "PCIe"


def _partition_numel(workload: Workload, machine: Machine) -> int:
    """P / N, rounded up: ZeRO's partitions are equal but for padding."""
    return -(-workload.model.numel // machine.gpus)


def _weight_bytes(workload: Workload) -> float:
    """ZeRO-2 replicates the weights, the frozen ones included."""
    return workload.dtype_bytes * (workload.model.numel + workload.model.frozen_numel)


def _bucket_bytes(workload: Workload, size: int = LARGEST_BUCKET) -> float:
    """What ZeRO-2 holds of gradients on their way: two buckets, since communication overlaps (Lightning's default).

    Args:
        workload: the training.
        size: elements of a bucket where the workload does not say it.
    """
    return 2 * workload.dtype_bytes * (workload.reduce_bucket_size or size)


def _rank_bandwidth(machine: Machine) -> float:
    """Host memory bandwidth for one rank, in bytes/s, while all ranks of its host use it."""
    return machine.cpu_bw * _GB / machine.ranks_per_host


def _check_positive(key: str, value: float) -> None:
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ConfigValueError(f"{key}={value!r}: allowed is a finite number > 0", key)


def _check_integer(key: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigValueError(f"{key}={value!r}: allowed is an integer >= 1", key)
