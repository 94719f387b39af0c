"""The table of `lightning-zenflow estimate`: memory, copies and CPU time of a training step, by formula, for any machine.

docs/estimate.md has what the formulas leave out. Pure, and without torch. 1 GB is 1e9 bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import STATE_BYTES
from lightning_zenflow.core.schedule import StaggeredSchedule, UpdateSchedule, blocks_wanted, bucket_size, candidates_of

_MOMENTS_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2 + 8 / 128}
"""Of both moments of a parameter; in 8 bits two scales are shared by 128."""

_MAX_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters`: gathered at a time."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training and its machine.

    Raises:
        ValueError: a number is not positive and finite, there are more GPUs than parameters, or there is no such stage.
    """

    params: float
    """Number of trained parameters."""
    gpus: int
    """Number over all hosts."""
    cpu_bw: float
    """Memory bandwidth of one host (STREAM triad), shared by its ranks, in GB/s."""
    frozen: float = 0.0
    """Number of parameters that are not trained."""
    gpus_per_host: int = 8
    stage: int = 2
    """Of ZeRO: 2 (or 1), every GPU has all weights; 3, each has a part, and gathers a layer's before it runs."""
    offload_parameters: bool = False
    """Whether weights are in host memory, under stage 3."""
    dtype_bytes: int = 2
    """b, bytes of a weight and of a gradient: 2 (bf16, fp16) or 4 (fp32)."""
    accumulate_grad_batches: int = 1
    """Micro-batches in an optimizer step."""

    def __post_init__(self) -> None:
        """Validates all fields."""
        for name, value in vars(self).items():
            bound = ">= 0" if name == "frozen" else "> 0"
            if not isinstance(value, bool) and not (0 < value < math.inf or (value == 0 and bound == ">= 0")):
                raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, got {self.stage!r}")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"stage must be 3 where offload_parameters is true, got {self.stage!r}")
        if self.gpus > self.params:
            raise ValueError(f"gpus must be at most the number of parameters, {self.params:g}, got {self.gpus}")

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share the memory of the fullest host."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def partition_numel(self) -> int:
        """P / N, rounded up: ZeRO's partitions are equal but for padding."""
        return math.ceil(self.params / self.gpus)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on one GPU: all of them, or under stage 3 its part and those that are gathered."""
        numel = self.params + self.frozen
        if self.stage < 3:
            return self.dtype_bytes * numel
        part = 0 if self.offload_parameters else self.partition_numel + self.frozen / self.gpus
        # One GPU's part is all of them.
        return self.dtype_bytes * min(numel, part + _MAX_LIVE_PARAMETERS)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of memory; bytes and seconds of a step."""

    device_bytes: float
    """Peak memory of one GPU, without activations."""
    host_bytes: float
    """Host memory of one rank."""
    d2h_bytes: float
    """From one GPU to the host."""
    h2d_bytes: float
    """From the host to one GPU."""
    cpu_s: float
    """CPU work for one rank, while all ranks of the host work."""


def costs(setup: Setup, config: ZenFlowConfig | None = None) -> Mapping[UpdateSchedule, Cost]:
    """Cost of a step by S and d, the least stale first, for all that the configuration allows.

    Args:
        setup: training and machine.
        config: ZenFlow's keys; its defaults if None.

    Raises:
        ValueError: parameters are in host memory, and a key asks for late weights.
    """
    config = config or ZenFlowConfig()
    if setup.offload_parameters:
        config = config.with_weights_on_host()
    return {s: _cost(setup, config, s) for s in candidates_of(config.update_intervals, config.publish_lags)}


def as_text(setup: Setup, costs: Mapping[UpdateSchedule, Cost]) -> str:
    """The costs as a table, and what its columns mean."""
    rows = []
    for schedule, c in costs.items():
        n_bytes = c.device_bytes, c.host_bytes * setup.ranks_per_host, c.d2h_bytes, c.h2d_bytes
        name = f"S = {schedule.update_interval}, d = {schedule.publish_lag}"
        rows.append([name, *(f"{n / 1e9:.1f}" for n in n_bytes), f"{1e3 * c.cpu_s:.0f}"])
    headers = ("schedule", "GPU GB", "host GB", "d2h GB", "h2d GB", "CPU ms")
    table = tabulate(rows, headers=headers, tablefmt="simple", colalign=("left", *["right"] * 5), disable_numparse=True)
    return (
        f"{table}\n\nGPU: one, without activations. Host: all ranks of one. d2h, h2d, CPU: one rank, a step.\n"
        "The CPU's work hides behind backward where d = 0, and behind the whole step where d > 0."
    )


def _cost(setup: Setup, config: ZenFlowConfig, schedule: UpdateSchedule) -> Cost:
    """Cost of one schedule, where the device has room for the gradients that are reapplied after a publish."""
    b, partition, s = setup.dtype_bytes, setup.partition_numel, schedule.update_interval
    device, owned = setup.weight_bytes + 2.0 * b * bucket_size(math.ceil(setup.params)), 0.0
    device += b * partition if setup.accumulate_grad_batches > 1 else 0
    if not schedule.is_immediate:
        owned = config.topk_ratio * partition
        device += (STATE_BYTES + b) * owned
        device += b * partition * schedule.kept_share if config.compensation.updates_provisionally else 0
    # Where parameters are in host memory, forward and backward of each micro-batch fetch them.
    fetches = 2.0 * setup.accumulate_grad_batches if setup.offload_parameters else 1 / s
    frozen_bytes = b * setup.frozen / setup.gpus if setup.offload_parameters else 0
    return Cost(
        device_bytes=device,
        host_bytes=_arena_bytes(setup, config, schedule, owned) + frozen_bytes,
        d2h_bytes=b * partition,
        h2d_bytes=(b * partition + frozen_bytes) * fetches,
        cpu_s=partition * _job_bytes(b, config, schedule) * setup.ranks_per_host / (setup.cpu_bw * 1e9) / s,
    )


def _job_bytes(b: int, config: ZenFlowConfig, schedule: UpdateSchedule) -> float:
    """Memory traffic of a job for one parameter, with the copies of its gradients and weights.

    A job reads and writes master weights and moments once, reads its gradients and writes weights. One that is submitted in backward
    commits S gradients, and applies one more tentatively.
    """
    s = schedule.update_interval
    n_applied = s + (config.submits_in_backward and schedule.publish_lag == 0)
    return 2 * (4 + _MOMENTS_BYTES[config.moments_dtype]) + b * (n_applied + 1) + b * (s + 1)


def _arena_bytes(setup: Setup, config: ZenFlowConfig, schedule: UpdateSchedule, owned_numel: float) -> float:
    """Host memory of one rank's arena (`worker.arena`) without its tables: states, slots, publish buffers, and a place to which the
    state of the device-owned entries is exported (`offload.columns`).
    """
    numel, in_backward = setup.partition_numel, config.submits_in_backward
    n_blocks = blocks_wanted(
        config.update_intervals, in_backward=in_backward, numel=numel, awaited_singly=setup.offload_parameters
    )
    staggered = StaggeredSchedule.of(
        schedule, n_blocks=n_blocks, in_backward=in_backward, in_place=setup.offload_parameters
    )
    slot_bytes = setup.dtype_bytes * numel / n_blocks
    state_bytes = 4 + _MOMENTS_BYTES[config.moments_dtype]
    return (
        state_bytes * numel + (staggered.n_slots + staggered.n_publish_buffers) * slot_bytes + STATE_BYTES * owned_numel
    )
