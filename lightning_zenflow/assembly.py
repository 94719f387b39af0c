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

from lightning_zenflow.affinity import WorkerCores
from lightning_zenflow.agreement import raise_together
from lightning_zenflow.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.auto_schedule import AutoSchedule, Pace
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.early_hand_over import EarlyHandOver
from lightning_zenflow.gauges import Gauges
from lightning_zenflow.gradients import GradientIntake
from lightning_zenflow.host_memory import check_host_memory
from lightning_zenflow.host_state import HostState
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.kernels import Kernels, kernels_for
from lightning_zenflow.ownership import Ownership
from lightning_zenflow.pace_control import PaceControl
from lightning_zenflow.partition import Slice, build_partition
from lightning_zenflow.planner import Planner
from lightning_zenflow.protocol import Rule
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.run_state import RunState
from lightning_zenflow.schedule import Schedule, blocks_wanted
from lightning_zenflow.selector import Selector
from lightning_zenflow.small_gradients import SmallGradients
from lightning_zenflow.stalls import StallClock
from lightning_zenflow.stand_in import StandIn
from lightning_zenflow.supervision import SupervisedWorker
from lightning_zenflow.topology import numa_nodes
from lightning_zenflow.tracing import Tracer
from lightning_zenflow.traffic import Traffic
from lightning_zenflow.windows import Publishing
from lightning_zenflow.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Shard:
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


class Parts:
    """The parts, each of which documents itself; the optimizer owns them and ends the worker.

    Args:
        config: the configuration.
        shard: what DeepSpeed has.
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
        shard: Shard,
        *,
        worker_cores: WorkerCores,
        ranks_on_host: int,
        hyperparameters: Callable[[], Sequence[GroupHyperparameters]],
        clips: bool,
    ) -> None:
        self._config, self._shard, self._worker_cores = config, shard, worker_cores
        device = shard.weights[0].device
        intervals, lags = config.update_intervals, config.publish_lags
        self.hands_over_early = config.hands_over_early and not clips
        """Whether steps with S = 1, d = 0 hand over in backward."""
        auto = AutoSchedule(intervals, lags, hides_in_backward=self.hands_over_early)
        self.tracer = Tracer(device, worker_threads=len(self._worker_cores.cores))
        self.stalls = StallClock(device, self.tracer)
        self.partition = build_partition(
            shard.slices, shard.partition_sizes, blocks_wanted(intervals, early=self.hands_over_early)
        )
        sizes = self._arena_sizes([Pace(update_interval=s, publish_lag=d) for s in intervals for d in lags])
        self._refuse_too_little_memory(sizes, self._arena_sizes([auto.pace]), ranks_on_host)
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
                shard.optimizer,
                shard.fp32_groups,
                partition=self.partition,
                partition_sizes=shard.partition_sizes,
                arena=self.arena,
            )
            self._build_steps_parts(auto, hyperparameters, device)
            undo.pop_all()

    def _build_steps_parts(
        self, auto: AutoSchedule, hyperparameters: Callable[[], Sequence[GroupHyperparameters]], device: torch.device
    ) -> None:
        config, shard = self._config, self._shard
        kernels = kernels_for(device)
        traffic = Traffic()
        self.rounds = Rounds(
            self.partition,
            arena=self.arena,
            worker=self.worker,
            pace=auto.pace,
            publishing=Publishing(
                rule=Rule[config.deferred_update.upper()],
                prediction=config.prediction,
            ),
            weights=shard.weights,
            stalls=self.stalls,
            tracer=self.tracer,
            traffic=traffic,
        )
        new_selector = partial(
            Selector,
            shard.names,
            shard.row_lengths,
            topk_ratio=config.topk_ratio,
            strategy=config.select_strategy,
            interval=config.select_interval,
            device=device,
        )
        pace = None
        if len(config.update_intervals) * len(config.publish_lags) > 1:
            pace = PaceControl(auto, stalls=self.stalls, group=shard.group, device=device)
        self.planner = Planner(config, self.rounds, pace, new_selector)
        self.ownership = Ownership(
            self.partition,
            self.arena,
            replayed=config.deferred_update == "replay",
            offload=config.offload,
            kernels=kernels,
            traffic=traffic,
            weights=shard.weights,
        )
        self.stand_in = self._build_stand_in(kernels, hyperparameters)
        small = SmallGradients(
            self.partition,
            self.rounds,
            self.ownership,
            kernels,
            self.tracer,
            traffic,
            device=device,
            dtype=shard.dtype,
        )
        self.early = EarlyHandOver(
            self.partition, self.arena, self.rounds, small, hyperparameters=hyperparameters, device=device
        )
        self.intake = GradientIntake(
            self.partition,
            self.rounds,
            self.early,
            small,
            self.ownership,
            self.stand_in,
            kernels,
            self.tracer,
            traffic,
            device=device,
            dtype=shard.dtype,
            accumulate_on=config.accumulate_on,
        )
        self.run_state = RunState(
            config,
            self.partition,
            dist.get_world_size(group=shard.group),
            rounds=self.rounds,
            ownership=self.ownership,
            planner=self.planner,
            stand_in=self.stand_in,
        )
        self.gauges = Gauges(
            self.partition,
            arena=self.arena,
            rounds=self.rounds,
            traffic=traffic,
            ownership=self.ownership,
            planner=self.planner,
            stalls=self.stalls,
            skipped=self.skipped,
            device=device,
        )

    def description(self) -> str:
        """What was decided, in one line."""
        config, pace = self._config, self.rounds.pace
        given = {"update_interval": pace.update_interval, "publish_lag": pace.publish_lag}
        auto = {key: " (auto, to begin with)" if getattr(config, key) == "auto" else "" for key in given}
        return (
            f"ZenFlow: {sum(s.numel for s in self.partition.slices):,} parameters on this rank in {len(self.partition.blocks)} blocks;"
            f" update_interval={pace.update_interval}{auto['update_interval']}, publish_lag={pace.publish_lag}{auto['publish_lag']};"
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
    ) -> StandIn | None:
        prediction = self._config.prediction
        if not prediction.moves:
            return None
        return StandIn(
            self.partition,
            self._shard.weights,
            prediction=prediction,
            pace=lambda: self.rounds.pace,
            rank=dist.get_rank(group=self._shard.group),
            kernels=kernels,
            hyperparameters=hyperparameters,
        )

    def _arena_sizes(self, paces: Sequence[Pace]) -> ArenaSizes:
        """Enough for any of these S and d."""
        schedules = [
            Schedule(
                n_blocks=len(self.partition.blocks),
                update_interval=pace.update_interval,
                publish_lag=pace.publish_lag,
            )
            for pace in paces
        ]
        return ArenaSizes(
            n_param_groups=len(self._shard.optimizer.param_groups),
            n_step_records=max(schedule.n_step_records for schedule in schedules),
            n_pages=max(schedule.n_pages for schedule in schedules),
            n_publish_buffers=max(schedule.n_publish_buffers for schedule in schedules),
            dtype=self._shard.dtype,
            n_threads=len(self._worker_cores.cores),
        )

    def _refuse_too_little_memory(self, largest: ArenaSizes, first: ArenaSizes, ranks_on_host: int) -> None:
        """Compares what the arenas of this host's ranks need with what there is; alike on all ranks.

        Args:
            largest: the arena as it is laid out.
            first: what of its pages and buffers is used at the start.
            ranks_on_host: ranks that share this host's memory.

        Raises:
            MisconfigurationException: they do not fit, here or on another rank's host.
        """
        used = dataclasses.replace(largest, n_pages=first.n_pages, n_publish_buffers=first.n_publish_buffers)
        keys = ("update_interval", "publish_lag", "max_update_interval")
        problem = check_host_memory(
            first=arena_bytes(self.partition, used),
            largest=arena_bytes(self.partition, largest),
            ranks=ranks_on_host,
            keys=", ".join(f"{key}={getattr(self._config, key)!r}" for key in keys),
        )
        # Before any rank has taken its memory.
        raise_together(None if problem is None else MisconfigurationException(problem), MisconfigurationException)
