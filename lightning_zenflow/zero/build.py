"""Builds what an optimizer step works with, in the order in which one part needs another."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import deepspeed.comm as dist
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.distributed import raise_together
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.provisional import ProvisionalUpdate
from lightning_zenflow.deferred.window import Publishing
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.native.protocol import Rule
from lightning_zenflow.schedule.auto_control import ScheduleControl
from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule, blocks_wanted
from lightning_zenflow.step.gradient_router import GradientRouter
from lightning_zenflow.step.in_backward import BackwardSubmission
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.step.run_state import RunState
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.stalls import StallClock
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.topk.selector import Selector
from lightning_zenflow.worker.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.worker.cores import WorkerCores
from lightning_zenflow.worker.memory import check_host_memory
from lightning_zenflow.worker.process import Worker
from lightning_zenflow.worker.supervisor import SupervisedWorker
from lightning_zenflow.worker.topology import numa_nodes
from lightning_zenflow.zero.host_state import HostState


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What DeepSpeed's optimizer knows of this rank's part of the training state."""

    optimizer: Optimizer
    """The user's; holds the fp32 partitions as its parameters."""
    fp32_groups: list[Tensor]
    """For each parameter group the rank's fp32 partition, which is replaced by the arena's."""
    partition_sizes: Sequence[int]
    """Elements of each, padding included."""
    slices: Sequence[Slice]
    """What of the model's parameters lies in them."""
    weights: Sequence[Tensor]
    """For each parameter group the rank's flat partition of the model's weights, on the device."""
    dtype: torch.dtype
    """The model's."""
    names: Sequence[str]
    """Of all parameters, in DeepSpeed's order."""
    row_lengths: Sequence[int]
    """Columns of each parameter's [out, rest] view."""
    group: ProcessGroup
    """The data-parallel ranks."""


class StepParts:
    """The parts, each of which documents itself; the optimizer owns them and ends the worker.

    Args:
        config: the configuration.
        rank_state: what DeepSpeed has.
        worker_cores: those of this rank's worker.
        ranks_on_host: ranks that share this host's memory.
        hyperparameters: reads those of the present step.
        clips: whether gradients are clipped, or scaled by a factor that a step's gradients decide on.

    Raises:
        MisconfigurationException: the host has not enough memory.
        WorkerError: the worker could not be started.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        rank_state: RankState,
        *,
        worker_cores: WorkerCores,
        ranks_on_host: int,
        hyperparameters: Callable[[], Sequence[GroupHyperparameters]],
        clips: bool,
    ) -> None:
        self._config, self._rank_state, self._worker_cores = config, rank_state, worker_cores
        device = rank_state.weights[0].device
        intervals, lags = config.update_intervals, config.publish_lags
        self.submits_in_backward = config.submits_in_backward and not clips
        """Whether steps with S = 1, d = 0 hand over in backward."""
        auto = SchedulePolicy(intervals, lags, hides_in_backward=self.submits_in_backward)
        self.tracer = Tracer(device, worker_threads=len(self._worker_cores.cores))
        self.stalls = StallClock(device, self.tracer)
        self.partition = build_partition(
            rank_state.slices, rank_state.partition_sizes, blocks_wanted(intervals, early=self.submits_in_backward)
        )
        sizes = self._arena_sizes([UpdateSchedule(update_interval=s, publish_lag=d) for s in intervals for d in lags])
        self._refuse_too_little_memory(sizes, self._arena_sizes([auto.schedule]), ranks_on_host)
        self.arena = Arena(self.partition, sizes, device=device, cores=worker_cores.cores)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        with ExitStack() as undo:
            undo.callback(self.arena.close, keep_state=False)
            # Before anything is written to the states: their memory belongs to the NUMA node of whoever touches it first.
            self.worker = SupervisedWorker(
                self._start_worker, max_restarts=config.max_worker_restarts, stalls=self.stalls
            )
            undo.callback(self.worker.kill)
            self.host_state = HostState(
                rank_state.optimizer,
                rank_state.fp32_groups,
                partition=self.partition,
                partition_sizes=rank_state.partition_sizes,
                arena=self.arena,
            )
            self._build_steps_parts(auto, hyperparameters, device)
            undo.pop_all()

    def _build_steps_parts(
        self, auto: SchedulePolicy, hyperparameters: Callable[[], Sequence[GroupHyperparameters]], device: torch.device
    ) -> None:
        config, rank_state = self._config, self._rank_state
        kernels = kernels_for(device)
        traffic = Traffic()
        self.jobs = JobQueue(
            self.partition,
            arena=self.arena,
            worker=self.worker,
            schedule=auto.schedule,
            publishing=Publishing(
                rule=Rule[config.deferred_update.upper()],
                prediction=config.prediction,
            ),
            weights=rank_state.weights,
            stalls=self.stalls,
            tracer=self.tracer,
            traffic=traffic,
        )
        new_selector = partial(
            Selector,
            rank_state.names,
            rank_state.row_lengths,
            topk_ratio=config.topk_ratio,
            strategy=config.select_strategy,
            interval=config.select_interval,
            device=device,
        )
        schedule = None
        if len(config.update_intervals) * len(config.publish_lags) > 1:
            schedule = ScheduleControl(auto, stalls=self.stalls, group=rank_state.group, device=device)
        self.planner = Planner(config, self.jobs, schedule, new_selector)
        self.ownership = Ownership(
            self.partition,
            self.arena,
            replayed=config.deferred_update == "replay",
            offload=config.offload,
            kernels=kernels,
            traffic=traffic,
            weights=rank_state.weights,
        )
        self.provisional = self._build_stand_in(kernels, hyperparameters)
        small = VectorGradients(
            self.partition,
            self.jobs,
            self.ownership,
            kernels,
            self.tracer,
            traffic,
            device=device,
            dtype=rank_state.dtype,
        )
        self.early = BackwardSubmission(
            self.partition, self.arena, self.jobs, small, hyperparameters=hyperparameters, device=device
        )
        self.router = GradientRouter(
            self.partition,
            self.jobs,
            self.early,
            small,
            self.ownership,
            self.provisional,
            kernels,
            self.tracer,
            traffic,
            device=device,
            dtype=rank_state.dtype,
            accumulate_on=config.accumulate_on,
        )
        self.run_state = RunState(
            config,
            self.partition,
            dist.get_world_size(group=rank_state.group),
            jobs=self.jobs,
            ownership=self.ownership,
            planner=self.planner,
            provisional=self.provisional,
        )
        self.counters = CounterReader(
            self.partition,
            arena=self.arena,
            jobs=self.jobs,
            traffic=traffic,
            ownership=self.ownership,
            planner=self.planner,
            stalls=self.stalls,
            skipped=self.skipped,
            device=device,
        )

    def description(self) -> str:
        """What was decided, in one line."""
        config, schedule = self._config, self.jobs.schedule
        given = {"update_interval": schedule.update_interval, "publish_lag": schedule.publish_lag}
        auto = {key: " (auto, to begin with)" if getattr(config, key) == "auto" else "" for key in given}
        return (
            f"ZenFlow: {sum(s.numel for s in self.partition.slices):,} parameters on this rank in {len(self.partition.blocks)} blocks;"
            f" update_interval={schedule.update_interval}{auto['update_interval']}, publish_lag={schedule.publish_lag}{auto['publish_lag']};"
            f" topk_ratio={config.topk_ratio:g}; {self._where_the_worker_runs()},"
            f" training with {torch.get_num_threads()} threads; {self.arena.reserved_bytes / 2**30:.2f} GiB of shared host memory"
        )

    def _where_the_worker_runs(self) -> str:
        cores = self._worker_cores.cores
        nodes = ", ".join(map(str, numa_nodes(cores)))
        return f"worker on cores {list(cores)}{f' of NUMA node {nodes}' if nodes else ''} ({self._worker_cores.reason})"

    def _start_worker(self) -> Worker:
        return Worker(self.arena, cores=self._worker_cores.cores, timeout_s=self._config.worker_timeout)

    def _build_stand_in(
        self, kernels: Kernels, hyperparameters: Callable[[], Sequence[GroupHyperparameters]]
    ) -> ProvisionalUpdate | None:
        prediction = self._config.prediction
        if not prediction.moves:
            return None
        return ProvisionalUpdate(
            self.partition,
            self._rank_state.weights,
            prediction=prediction,
            schedule=lambda: self.jobs.schedule,
            rank=dist.get_rank(group=self._rank_state.group),
            kernels=kernels,
            hyperparameters=hyperparameters,
        )

    def _arena_sizes(self, schedules: Sequence[UpdateSchedule]) -> ArenaSizes:
        """Enough for any of these S and d."""
        staggered = [
            StaggeredSchedule(
                n_blocks=len(self.partition.blocks),
                update_interval=schedule.update_interval,
                publish_lag=schedule.publish_lag,
            )
            for schedule in schedules
        ]
        return ArenaSizes(
            n_param_groups=len(self._rank_state.optimizer.param_groups),
            n_step_records=max(s.n_step_records for s in staggered),
            n_slots=max(s.n_slots for s in staggered),
            n_publish_buffers=max(s.n_publish_buffers for s in staggered),
            dtype=self._rank_state.dtype,
            n_threads=len(self._worker_cores.cores),
        )

    def _refuse_too_little_memory(self, largest: ArenaSizes, first: ArenaSizes, ranks_on_host: int) -> None:
        """Compares what the arenas of this host's ranks need with what there is; alike on all ranks.

        Args:
            largest: the arena as it is laid out.
            first: what of its slots and buffers is used at the start.
            ranks_on_host: ranks that share this host's memory.

        Raises:
            MisconfigurationException: they do not fit, here or on another rank's host.
        """
        used = dataclasses.replace(largest, n_slots=first.n_slots, n_publish_buffers=first.n_publish_buffers)
        keys = ("update_interval", "publish_lag", "max_update_interval")
        problem = check_host_memory(
            first=arena_bytes(self.partition, used),
            largest=arena_bytes(self.partition, largest),
            ranks=ranks_on_host,
            keys=", ".join(f"{key}={getattr(self._config, key)!r}" for key in keys),
        )
        # Before any rank has taken its memory.
        raise_together(None if problem is None else MisconfigurationException(problem), MisconfigurationException)
