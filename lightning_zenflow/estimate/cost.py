"""Predicted memory, traffic and time of a training step on a machine that is not at hand. Pure Python.

Three ways to train are compared: ZeRO-2 without offload, DeepSpeed's ZeRO-Offload (ZeRO-2 with the optimizer on the host), and ZenFlow. P
is the number of trained parameters, N the number of GPUs; every rank updates a partition of P / N parameters. b is the size of an
element of the model's dtype in bytes. docs/estimate.md has the formulas and what they leave out.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import STATE_BYTES, cpu_adamw_bytes, zero_offload_traffic
from lightning_zenflow.estimate.machine import GB, Machine, Workload
from lightning_zenflow.estimate.zenflow_cost import BACKWARD_SHARE, ZenFlowCost
from lightning_zenflow.schedule.candidates import candidates_of
from lightning_zenflow.schedule.staggered import UpdateSchedule

_NEGLIGIBLE = 0.02
"""Share of a step below which waits are not reported as a limit; the target of `auto`."""

Limit = Literal["device memory", "host memory", "PCIe", "CPU", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one way to train."""

    device_bytes: int
    """Peak memory of one GPU, without activations."""
    host_bytes: int
    """Page-locked memory of all ranks of the fullest host."""
    d2h_bytes: int
    """From one GPU to the host in one step."""
    h2d_bytes: int
    """From the host to one GPU in one step."""
    step_s: float
    """Mean duration of a step."""
    fits_device: bool
    fits_host: bool | None
    """None if the host's memory is unknown."""
    cpu_s: float = 0.0
    """CPU work for one rank in a step, while all ranks of the host work."""
    copy_s: float = 0.0
    """Exposed copies across PCIe in a step."""
    wait_s: float = 0.0
    """Waits for the CPU in a step."""

    @property
    def fits(self) -> bool:
        """True unless a memory is known to be too small."""
        return self.fits_device and self.fits_host is not False


@dataclass(frozen=True, kw_only=True)
class CostComparison:
    """Costs of the three ways to train."""

    machine: Machine
    workload: Workload
    none: Cost
    """ZeRO-2 without offload."""
    zero_offload: Cost
    zenflow: Cost
    schedule: UpdateSchedule
    """S and d that ZenFlow settles at."""
    tail: float
    """Share of the blocks that arrive last in backward and are published a step later there, where d = 0."""
    owns_tail: bool
    """Whether the GPU owns their weights, so that nothing is late."""
    immediate: Cost
    """ZenFlow with S = 1, d = 0, submitted in backward, without a tail: AdamW itself."""
    fastest: Cost
    """ZenFlow with `fastest_schedule`. `auto` takes the least stale S and d whose CPU work hides, which may copy more."""
    fastest_schedule: UpdateSchedule
    """The least stale of the allowed S and d that are at most 2 % slower than the fastest."""
    limit: Limit
    """Reason why ZenFlow is slower than training without offload."""


def estimate(workload: Workload, machine: Machine, config: ZenFlowConfig | None = None) -> CostComparison:
    """Predicts memory, traffic and time of a step.

    Args:
        workload: the training.
        machine: the hardware.
        config: ZenFlow's keys; its defaults if None.

    Raises:
        ConfigValueError: there are more GPUs than parameters.
    """
    config = config or ZenFlowConfig()
    if workload.model.numel < machine.gpus:
        raise ConfigValueError(
            f"gpus must be at most the number of parameters, {workload.model.numel}, got {machine.gpus}", "gpus"
        )
    known: list[tuple[ZenFlowConfig, tuple[Cost, ZenFlowCost]]] = []

    def cost_of(config: ZenFlowConfig) -> tuple[Cost, ZenFlowCost]:
        # A fixed schedule is asked for several times; its simulation takes long. Configurations have no hash.
        result = next((result for known_config, result in known if known_config == config), None)
        if result is None:
            result = _zenflow(workload, machine, config)
            known.append((config, result))
        return result

    zenflow, model = cost_of(config)
    settled = model.settled_steps()[-1]
    immediate, _ = cost_of(
        dataclasses.replace(config, update_interval=1, publish_lag=0, optimizer_in_backward=True, tail="none")
    )
    schedules = candidates_of(config.update_intervals, config.publish_lags)
    fixed = [
        (cost_of(dataclasses.replace(config, **dataclasses.asdict(schedule)))[0], schedule) for schedule in schedules
    ]
    # Of those that do not fit, none is chosen unless all of them are.
    fixed = [(cost, schedule) for cost, schedule in fixed if cost.fits_host is not False] or fixed
    shortest_s = min(cost.step_s for cost, _ in fixed)
    fastest, fastest_schedule = next((c, p) for c, p in fixed if c.step_s <= (1 + _NEGLIGIBLE) * shortest_s)
    return CostComparison(
        machine=machine,
        workload=workload,
        none=_no_offload(workload, machine),
        zero_offload=_zero_offload(workload, machine),
        zenflow=zenflow,
        schedule=settled.schedule,
        tail=settled.tail if settled.schedule.publish_lag == 0 else 0.0,
        owns_tail=model.owns_tail,
        immediate=immediate,
        fastest=fastest,
        fastest_schedule=fastest_schedule,
        limit=_limit(zenflow),
    )


def _no_offload(workload: Workload, machine: Machine) -> Cost:
    """ZeRO-2: replicated weights; master weights, moments and reduced gradients of the partition, and an fp32 copy of these in the step.

    The buckets are free by then (`DeepSpeedZeroOptimizer.step` and `_release_ipg_buffers`, DeepSpeed 0.19.8).
    """
    b, partition = workload.dtype_bytes, workload.partition_numel(machine.gpus)
    in_step = 4 * partition if b < 4 else 0
    return _cost(
        machine,
        device_bytes=workload.weight_bytes + (STATE_BYTES + b) * partition + max(workload.bucket_bytes(), in_step),
        step_s=workload.step_s,
    )


def _zero_offload(workload: Workload, machine: Machine) -> Cost:
    """ZeRO-Offload of DeepSpeed 0.19.8 at its best: page-locked memory, and gradient copies that overlap with backward.

    The step waits for the CPU and for the weights. The host holds master weights, moments, fp32 gradients, a buffer of the weights and
    the running sum of gradients; the device holds weights, buckets and a buffer of the size of the largest parameter.
    """
    b, partition = workload.dtype_bytes, workload.partition_numel(machine.gpus)
    n = workload.accumulate_grad_batches
    d2h, h2d = zero_offload_traffic(dtype_bytes=b, accumulate_grad_batches=n)
    in_backward_s = (d2h + h2d - b) * partition / machine.pcie_bytes_per_s
    copy_s = max(0.0, in_backward_s - BACKWARD_SHARE * workload.step_s) + b * partition / machine.pcie_bytes_per_s
    cpu_s = cpu_adamw_bytes(b) * partition / machine.rank_bytes_per_s
    return _cost(
        machine,
        device_bytes=workload.weight_bytes + workload.bucket_bytes() + b * workload.model.largest_numel,
        rank_host_bytes=(STATE_BYTES + 4 + b + (b if n > 1 else 0)) * partition,
        d2h_bytes=d2h * partition,
        h2d_bytes=h2d * partition,
        cpu_s=cpu_s,
        copy_s=copy_s,
        wait_s=cpu_s,
        step_s=workload.step_s + copy_s + cpu_s,
    )


def _zenflow(workload: Workload, machine: Machine, config: ZenFlowConfig) -> tuple[Cost, ZenFlowCost]:
    """ZenFlow, averaged over the steps after its schedule has settled."""
    model = ZenFlowCost(workload, machine, config)
    steps = model.settled_steps()
    schedule = steps[-1].schedule
    cost = _cost(
        machine,
        device_bytes=model.peak_device_bytes(),
        rank_host_bytes=model.host_bytes(),
        d2h_bytes=model.d2h_bytes(),
        h2d_bytes=model.h2d_bytes(schedule),
        cpu_s=sum(s.worker_s for s in steps) / len(steps),
        copy_s=model.exposed_copy_s(schedule),
        wait_s=sum(s.stall_s for s in steps) / len(steps),
        step_s=sum(s.device_s + s.stall_s for s in steps) / len(steps),
    )
    return cost, model


def _cost(
    machine: Machine,
    *,
    device_bytes: float,
    rank_host_bytes: float = 0.0,
    d2h_bytes: float = 0.0,
    h2d_bytes: float = 0.0,
    **seconds: float,
) -> Cost:
    host_bytes = rank_host_bytes * machine.ranks_per_host
    return Cost(
        device_bytes=round(device_bytes),
        host_bytes=round(host_bytes),
        d2h_bytes=round(d2h_bytes),
        h2d_bytes=round(h2d_bytes),
        fits_device=device_bytes <= machine.gpu_mem * GB,
        fits_host=None if machine.host_mem is None else host_bytes <= machine.host_mem * GB,
        **seconds,
    )


def _limit(zenflow: Cost) -> Limit:
    if not zenflow.fits_device:
        return "device memory"
    if zenflow.fits_host is False:
        return "host memory"
    if max(zenflow.wait_s, zenflow.copy_s) <= _NEGLIGIBLE * zenflow.step_s:
        return "nothing"
    return "CPU" if zenflow.wait_s > zenflow.copy_s else "PCIe"
