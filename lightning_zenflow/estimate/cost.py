"""Memory, traffic and CPU time of a training step on a machine that is not at hand. docs/estimate.md has what the formulas leave out."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import STATE_BYTES, Slice
from lightning_zenflow.deferred.in_place import InPlacePublisher
from lightning_zenflow.deferred.memory import Publisher
from lightning_zenflow.estimate.setup import Setup
from lightning_zenflow.schedule.auto_policy import LIKELY_HIDDEN, candidates_of, least_stale, occupancies
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule, blocks_wanted, bucket_size
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes


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

    def fullness(self, setup: Setup) -> dict[str, float]:
        """Needed share of each memory: "GPU", "host"; above 1 it is too small."""
        host = self.host_bytes * setup.ranks_per_host / setup.host_mem
        return {"GPU": self.device_bytes / setup.gpu_mem / 1e9, "host": host / 1e9}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Costs of a training."""

    setup: Setup
    costs: Mapping[UpdateSchedule, Cost]
    """By S and d, the least stale first: all that the configuration allows and the host has memory for (all if none fits)."""
    schedule: UpdateSchedule
    """The least stale of them whose CPU work hides behind the step, or else the one that comes nearest to it (`schedule.auto_policy`)."""
    hides: bool


def estimate(setup: Setup, config: ZenFlowConfig | None = None) -> Estimate:
    """Estimates memory, traffic and CPU time of a step.

    Args:
        setup: training and machine.
        config: ZenFlow's keys; its defaults if None.

    Raises:
        ValueError: parameters are in host memory, and a key asks for late weights.
    """
    config = config or ZenFlowConfig()
    if setup.offload_parameters:
        config = config.with_weights_on_host()
    candidates = candidates_of(config.update_intervals, config.publish_lags)
    costs = {schedule: _cost(setup, config, schedule) for schedule in candidates}
    costs = {schedule: cost for schedule, cost in costs.items() if cost.fullness(setup)["host"] <= 1} or costs
    loads = {schedule: 1e3 * cost.cpu_s / _hiding_ms(setup, schedule) for schedule, cost in costs.items()}
    schedule = least_stale(loads, in_backward=config.submits_in_backward)
    occupied = occupancies(loads, in_backward=config.submits_in_backward)[schedule]
    if setup.offload_parameters:
        # Each layer is awaited where it is fetched: the whole step hides the work.
        occupied = loads[schedule]
    hides = occupied <= LIKELY_HIDDEN
    return Estimate(setup=setup, costs=costs, schedule=schedule, hides=hides)


def _hiding_ms(setup: Setup, schedule: UpdateSchedule) -> float:
    """The step; where d = 0 without the gather, before which the work has to be done."""
    return setup.step_ms if schedule.publish_lag > 0 else max(setup.step_ms - setup.gather_ms, 1e-9)


def _cost(setup: Setup, config: ZenFlowConfig, schedule: UpdateSchedule) -> Cost:
    """Cost of one schedule. Gradients that are reapplied after a publish stay on the device where it has room for all of them, and are
    read back over PCIe elsewhere.
    """
    b, model, partition = setup.dtype_bytes, setup.model, setup.partition_numel
    s, d = schedule.update_interval, schedule.publish_lag
    device = setup.weight_bytes + 2.0 * b * bucket_size(model.numel)
    device += b * partition if setup.accumulate_grad_batches > 1 else 0
    owned = read_back = 0.0
    if not schedule.is_immediate:
        owned = model.device_owned_numel(config.topk_ratio) / setup.gpus
        device += (STATE_BYTES + b) * owned
        if config.compensation.updates_provisionally:
            device += 4 * model.factor_numel / setup.gpus
            kept = b * partition * schedule.kept_share
            has_room = device + kept <= setup.gpu_mem * 1e9
            device, read_back = (device + kept, 0.0) if has_room else (device, b * partition * d / s)
    return Cost(
        device_bytes=device,
        host_bytes=_arena_bytes(setup, config, schedule, owned),
        d2h_bytes=b * partition,
        h2d_bytes=_fetched_bytes(setup) if setup.offload_parameters else b * partition / s + read_back,
        cpu_s=partition * _replay_s(setup, config, schedule) / s,
    )


def _fetched_bytes(setup: Setup) -> float:
    """From the host to one GPU in a step, where parameters are in host memory: its part, for forward and backward of each micro-batch."""
    return 2.0 * setup.accumulate_grad_batches * setup.dtype_bytes * setup.partition_numel


def _replay_s(setup: Setup, config: ZenFlowConfig, schedule: UpdateSchedule) -> float:
    """Seconds of the worker for one job, per parameter, while the block's copies use the host's memory too.

    A job reads and writes master weights and moments once, reads its gradients and writes weights: 24 + b n + b bytes; with moments in
    16 or 8 bits 16 or 12.1 in the place of 24. One that is submitted in backward commits S gradients, and applies one more tentatively.
    Arithmetic takes a core 0.1 + 0.42 S ns, and 1.3 ns more with moments in 8 bits: in its first-level cache, a core with 512-bit vectors
    took 0.42 ns for an update, which division and square root bound,
    and 0.05 to 0.1 ns more for a job. In `benchmarks.kernel`, where memory takes part, S = 4, 8 and 16 took 1.9, 3.7 and 7.3 ns of it.
    """
    b, s = setup.dtype_bytes, schedule.update_interval
    n_applied = s + (config.submits_in_backward and schedule.publish_lag == 0)
    states, coding_ns = {"float32": (24, 0.0), "bfloat16": (16, 0.0), "int8": (12.1, 1.3)}[config.moments_dtype]
    traffic = states + b * (n_applied + 1) + b * (s + 1)
    memory_s = traffic / setup.rank_bytes_per_s
    if setup.cpu_cores is None:
        return memory_s
    cores = setup.cpu_cores / setup.ranks_per_host
    of_worker = max(1.0, cores - round(config.pt_reserved_cores_perc * cores))
    return max(memory_s, 1e-9 * (0.1 + 0.42 * n_applied + coding_ns) / of_worker)


def _arena_bytes(setup: Setup, config: ZenFlowConfig, schedule: UpdateSchedule, owned_numel: float) -> int:
    """Host memory of one rank's arena: its own layout, of a partition without padding. The state of the device-owned entries of the
    partition is exported to a place of its own (`topk.state_export`).
    """
    numel, in_backward = setup.partition_numel, config.submits_in_backward
    n_blocks = blocks_wanted(
        config.update_intervals, in_backward=in_backward, numel=numel, awaited_singly=setup.offload_parameters
    )
    publisher = InPlacePublisher if setup.offload_parameters else Publisher
    dtype = torch.bfloat16 if setup.dtype_bytes == 2 else torch.float32
    whole = Slice.of((numel,), parameter=0, param_group=0, begin=0, start=0, numel=numel)
    partition = publisher.cut([whole], [numel], n_blocks, dtype)
    staggered = StaggeredSchedule.of(schedule, n_blocks=len(partition.blocks), in_backward=in_backward)
    sizes = ArenaSizes(
        n_param_groups=1,
        n_step_records=staggered.n_step_records,
        n_slots=staggered.n_slots,
        n_publish_buffers=publisher.n_buffers(staggered),
        dtype=dtype,
        moments_dtype=getattr(torch, config.moments_dtype),
        export_bytes=round(STATE_BYTES * owned_numel),
    )
    return arena_bytes(partition, sizes)
