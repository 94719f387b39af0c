"""Construction of a rank's components from DeepSpeed's optimizer."""

import dataclasses
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import SideStream
from lightning_zenflow.core.distributed import all_agree, in_common, raise_together, raising_together
from lightning_zenflow.core.partition import Partition, Slice, build_partition
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.memory import Publisher, SlotPool
from lightning_zenflow.deferred.provisional_update import ProvisionalUpdate
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.candidates import candidates_of, that_fit, with_changes
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule, blocks_wanted
from lightning_zenflow.step.auto_control import ScheduleControl
from lightning_zenflow.step.fill import Fill
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.step.run_state import StepParts
from lightning_zenflow.telemetry.telemetry import Telemetry
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.topk.selector import Selector
from lightning_zenflow.topk.state_export import export_bytes
from lightning_zenflow.worker.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.worker.cores import WorkerCores
from lightning_zenflow.worker.memory import check_host_memory, host_bytes_for
from lightning_zenflow.worker.process import Worker
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker
from lightning_zenflow.worker.topology import numa_nodes
from lightning_zenflow.zero.environment import RankResources
from lightning_zenflow.zero.host_state import HostState


@dataclass(frozen=True, kw_only=True)
class ZeroPartition:
    """This rank's part of the training state, as DeepSpeed's optimizer holds it."""

    optimizer: Optimizer
    """The user's; its parameters are the fp32 partitions."""
    fp32_groups: list[Tensor]
    """For each parameter group the rank's fp32 partition, which is replaced by the arena's."""
    partition_sizes: Sequence[int]
    """Elements of each, padding included."""
    slices: Sequence[Slice]
    """Parts of the model's parameters that lie in the partitions."""
    weights: Sequence[Tensor]
    """For each parameter group the rank's flat partition of the model's weights, on the device."""
    names: Sequence[str]
    """Names of all parameters, in DeepSpeed's order."""
    row_lengths: Sequence[int]
    """Columns of each parameter's [out, rest] view."""
    group: dist.ProcessGroup
    """Data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Components of one rank: those that must be closed, and those of the step."""

    worker: SupervisedWorker
    host_state: HostState
    step: StepParts
    description: str
    """Decisions of the setup, in one line."""


def build(config: ZenFlowConfig, zero: ZeroPartition, resources: RankResources) -> RankParts:
    """Builds the components in the order in which one needs another; the caller closes worker and arena.

    Raises:
        MisconfigurationException: this or another host has too little memory.
        WorkerError: the worker could not be started.
        RuntimeError: page-locked memory was refused; or another rank has failed, whose error is in the message.
    """
    device = zero.weights[0].device
    n_blocks = blocks_wanted(
        config.update_intervals, in_backward=config.submits_in_backward, numel=sum(zero.partition_sizes)
    )
    partition = build_partition(zero.slices, zero.partition_sizes, n_blocks)
    sizes, policy = _sizes_and_policy(config, zero, partition, resources)
    # Outermost, so that ranks that have built their parts release them if another one has not.
    with ExitStack() as undo:
        with raising_together(RuntimeError):
            arena = Arena(partition, sizes, device=device, cores=resources.cores.cores)
            undo.callback(arena.close, keep_state=False)
            rank = RankState(
                partition=partition,
                arena=arena,
                weights=zero.weights,
                kernels=kernels_for(device),
                telemetry=Telemetry.create(device),
                d2h=SideStream(device),
            )
            # Before anything is written to the states: their memory comes from the NUMA node of the thread that touches it first.
            worker = SupervisedWorker(
                partial(Worker, arena, cores=resources.cores.cores, timeout_s=config.worker_timeout),
                max_restarts=config.max_worker_restarts,
                stalls=rank.telemetry.stalls,
            )
            undo.callback(worker.kill)
            host_state = HostState(
                zero.optimizer,
                zero.fp32_groups,
                partition=partition,
                partition_sizes=zero.partition_sizes,
                arena=arena,
            )
            step = _build_step(config, zero, rank, worker, host_state, policy)
        undo.pop_all()
    return RankParts(
        worker=worker,
        host_state=host_state,
        step=step,
        description=_description(config, rank, step.jobs.schedule, resources.cores),
    )


def _build_step(
    config: ZenFlowConfig,
    zero: ZeroPartition,
    rank: RankState,
    worker: SupervisedWorker,
    host_state: HostState,
    policy: SchedulePolicy,
) -> StepParts:
    slots, publisher = SlotPool(rank.partition, rank.arena, rank.books), Publisher(rank)
    jobs = JobQueue(
        rank,
        worker,
        slots,
        publisher,
        policy.schedule,
        config.compensation,
        in_backward=config.submits_in_backward,
    )
    selector = Selector(
        zero.names,
        zero.row_lengths,
        topk_ratio=config.topk_ratio,
        strategy=config.select_strategy,
        interval=config.select_interval,
        device=rank.device,
    )
    ownership = Ownership(rank, worker, topk_ratio=config.owned_ratio)
    provisional = ProvisionalUpdate(
        rank, jobs.in_flight, publisher, config.compensation, rank_number=dist.get_rank(zero.group)
    )
    fill = Fill(rank, slots, jobs, ownership, provisional, accumulate_on=config.accumulate_on)
    control = None
    if config.measures:
        control = ScheduleControl(policy, config, rank, fill.arrivals, group=zero.group)
    planner = Planner(config, jobs, control, selector)
    skipped = torch.zeros((), dtype=torch.int64, device=rank.device)
    return StepParts(
        rank=rank,
        slots=slots,
        jobs=jobs,
        ownership=ownership,
        provisional=provisional,
        fill=fill,
        selector=selector,
        planner=planner,
        counters=CounterReader(rank, jobs, fill.in_backward, ownership, skipped=skipped),
        write_count=host_state.write_count,
        skipped=skipped,
    )


def _sizes_and_policy(
    config: ZenFlowConfig, zero: ZeroPartition, partition: Partition, resources: RankResources
) -> tuple[ArenaSizes, SchedulePolicy]:
    """Sizes of an arena for any schedule that the configuration allows, and a policy for those that the host has memory for.

    Raises:
        MisconfigurationException: the arenas do not fit the memory of this or another rank's host; the same on all ranks.
    """

    def sizes(schedules: Sequence[UpdateSchedule], *, tail: bool) -> ArenaSizes:
        n_blocks = len(partition.blocks)
        # One rank's tail may be all of its blocks, where the mean over the ranks is small.
        late = frozenset(range(n_blocks if tail else 0))
        staggered = [
            StaggeredSchedule.of(schedule, n_blocks=n_blocks, in_backward=config.submits_in_backward, tail=late)
            for schedule in with_changes(schedules)
        ]
        return ArenaSizes(
            n_param_groups=len(zero.optimizer.param_groups),
            n_step_records=max(s.n_step_records for s in staggered),
            n_slots=max(s.n_slots for s in staggered),
            n_publish_buffers=max(s.n_publish_buffers for s in staggered),
            dtype=zero.weights[0].dtype,
            moments_dtype=getattr(torch, config.moments_dtype),
            n_threads=len(resources.cores.cores),
            export_bytes=export_bytes(partition, config.owned_ratio),
        )

    def n_bytes(schedules: Sequence[UpdateSchedule], *, tail: bool) -> int:
        return arena_bytes(partition, sizes(schedules, tail=tail))

    # The state of an earlier fit may be garbage that has not been collected, and would count as taken.
    gc.collect()
    available = host_bytes_for(resources.ranks_on_host)

    def fits(schedules: Sequence[UpdateSchedule], *, tail: bool = config.requires_tail) -> bool:
        return n_bytes(schedules, tail=tail) <= available

    candidates = candidates_of(config.update_intervals, config.publish_lags)
    # The same on all ranks. Without any that fits, the check below says so.
    kept = in_common(that_fit(candidates, fits)) or candidates
    allows_tail = config.allows_tail and (config.requires_tail or all_agree(fits(kept, tail=True)))
    policy = SchedulePolicy(kept, hides_in_backward=config.submits_in_backward, allows_tail=allows_tail)
    largest = sizes(candidates, tail=config.allows_tail)
    at_start = sizes([policy.schedule], tail=False)
    used = dataclasses.replace(largest, n_slots=at_start.n_slots, n_publish_buffers=at_start.n_publish_buffers)
    problem = check_host_memory(
        first=arena_bytes(partition, used),
        largest=n_bytes(kept, tail=allows_tail),
        ranks=resources.ranks_on_host,
        keys=", ".join(
            f"{key}={getattr(config, key)!r}"
            for key in ("update_interval", "publish_lag", "max_update_interval", "topk_ratio")
        ),
    )
    # Before any rank has taken its memory.
    raise_together(None if problem is None else MisconfigurationException(problem), MisconfigurationException)
    _log_left_out([c for c in candidates if c not in kept], tail=config.allows_tail and not allows_tail)
    return largest, policy


def _log_left_out(schedules: Sequence[UpdateSchedule], *, tail: bool) -> None:
    left_out = [f"update_interval={s.update_interval}, publish_lag={s.publish_lag}" for s in schedules]
    left_out += ["a tail"] * tail
    if left_out:
        rank_zero_info(f"ZenFlow: auto leaves out what host memory has no room for: {'; '.join(left_out)}")


def _description(config: ZenFlowConfig, rank: RankState, schedule: UpdateSchedule, cores: WorkerCores) -> str:
    given = {"update_interval": schedule.update_interval, "publish_lag": schedule.publish_lag}
    auto = {key: " (auto, to begin with)" if getattr(config, key) == "auto" else "" for key in given}
    nodes = ", ".join(map(str, numa_nodes(cores.cores)))
    unused = " (of no use: no weight is ever late)" if config.owned_ratio < config.topk_ratio else ""
    where = f"worker on cores {list(cores.cores)}{f' of NUMA node {nodes}' if nodes else ''} ({cores.reason})"
    return (
        f"ZenFlow: {sum(s.numel for s in rank.partition.slices):,} parameters on this rank in {len(rank.partition.blocks)} blocks;"
        f" update_interval={schedule.update_interval}{auto['update_interval']},"
        f" publish_lag={schedule.publish_lag}{auto['publish_lag']}; topk_ratio={config.topk_ratio:g}{unused}; {where},"
        f" training with {torch.get_num_threads()} threads; {rank.arena.reserved_bytes / 2**30:.2f} GiB of shared host memory"
    )
