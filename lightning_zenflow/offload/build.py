"""Construction of a rank's components; what the engine around a training gives and is asked for."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import PAGE_BYTES, SideStream, runtime_of
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Partition, Slice, build_partition, row_length
from lightning_zenflow.core.process import in_common, raise_together, raising_together
from lightning_zenflow.core.schedule import (
    StaggeredSchedule,
    UpdateSchedule,
    blocks_wanted,
    candidates_of,
    that_fit,
    with_changes,
)
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.kernels.base import kernels_for
from lightning_zenflow.offload.columns import Ownership, Selector
from lightning_zenflow.offload.fill import Fill
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.owner_moves import OwnerMoves
from lightning_zenflow.offload.plan import Planner, ScheduleControl, SchedulePolicy
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Blocks, RankState
from lightning_zenflow.offload.resident import Residents, last_arrivals, n_that_fit, resident_bytes
from lightning_zenflow.offload.run_state import HostState, StepParts
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.worker.machine import (
    WorkerCores,
    free_host_memory,
    lack_of_host_memory,
    places_on_this_host,
    read_place,
    worker_cores,
)
from lightning_zenflow.worker.process import SupervisedWorker, Worker


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """This rank's part of the training state, as the optimizer around the step holds it."""

    optimizer: Optimizer
    groups: Sequence[Mapping[str, Tensor]]
    """For each of its groups the trained parameters by name; `Slice.parameter` counts all of them in this order."""
    shapes: Mapping[str, torch.Size]
    """Of the whole parameters, by name, in the same order."""
    piece_of: Callable[[Tensor], Tensor] | None = None
    """This rank's piece of a parameter that the ranks divide, with padding, or the parameter where it is whole; None: all are whole."""
    masters: Sequence[Tensor]
    """The rank's flat fp32 partitions, parameters of the optimizer, whose memory is replaced by the arena's."""
    slices: Sequence[Slice]
    """Parts of the model's parameters that lie in the partitions."""
    weights: Sequence[Tensor]
    """For each flat partition the model's weights, which the values of `masters` equal. In place only their lengths and type count."""
    device: torch.device
    """Of the gradients."""
    in_place: bool = False
    """Whether `RankState.weights`, in host memory, take the place of `weights` until the arena is closed. Forked processes do not have that
    memory."""
    release_weights: Callable[[], None] | None = None
    """In place: frees the memory of the model's weights, when the arena has master weights and before the rest of it takes memory."""
    group: dist.ProcessGroup | None
    """Data-parallel ranks; None: this one alone, without `torch.distributed`."""
    module_order: Sequence[str] | None = None
    """Names of parameters, these among others, in the order of the module, which backward reverses; None: that of `groups`."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those of all groups."""
        return {name: p for group in self.groups for name, p in group.items()}


class Engine:
    """What a training asks of the optimizer around it, which may have nothing to do."""

    loss_scale: float
    """Factor that the loss is multiplied by before backward."""
    add_gradient: Callable[[Tensor, Tensor], None] | None = None
    """Receives a parameter and a gradient that autograd adds to its present one; the engine then calls `ServedGradients.put` for a gradient
    that arrives. None: the training does, behind a backward pass.
    """

    def read_groups(self) -> list[GroupHyperparameters]:
        """Present hyperparameters of each flat partition; never waits for a device."""
        raise NotImplementedError

    def gather_weights(self) -> None:
        """Exchanges the ranks' updated weights, where that is not done when they are used."""

    def take_weights(self) -> None:
        """Copies weights that are in place to memory of their own, before the arena's is freed; perhaps in the engine's constructor."""

    def join_reads(self) -> None:
        """Orders the training stream behind reads of weights on streams of the engine's."""

    def refuse_use(self) -> None:
        """Raises MisconfigurationException if no training can go on at present."""

    def refuse_other_backward(self) -> None:
        """Raises MisconfigurationException if there are gradients of a backward pass that the front has not begun."""

    def refuse_unused(self) -> None:
        """Raises MisconfigurationException on all ranks if the step that is complete must have a gradient of a parameter, and has none."""

    def has_ended(self) -> None:
        """Called when the worker has ended."""


@dataclass(frozen=True, kw_only=True)
class RankResources:
    """Host resources of one rank."""

    cores: WorkerCores
    ranks_on_host: int
    """Ranks that share the host's memory."""
    word_timeout_s: float
    """Limit of the worker's wait for a word, which is behind collectives."""


def rank_resources(
    config: ZenFlowConfig,
    device: torch.device,
    *,
    ranks_on_host: int | None,
    world_size: int,
    timeout: timedelta | None,
) -> RankResources:
    """Chooses the worker's cores; all ranks call it together. `ranks_on_host`: None: as the ranks find out. `timeout` is that of
    collectives; None: torch's default. ValueError: this or another rank may not use the cores that `worker_cores` asks for, or its
    `HOST_MEMORY` is wrong.
    """
    places, index = places_on_this_host(read_place(device))
    with raising_together(ValueError):
        free_host_memory()  # Refuses a wrong value of its environment variable.
        cores = worker_cores(
            config.worker_cores, places=places, index=index, reserved_share=config.pt_reserved_cores_perc
        )
    # With one rank a word waits for the device alone.
    collective_s = (timeout or default_pg_timeout).total_seconds() if world_size > 1 else 0.0
    # Less than the 32 bits of milliseconds that `worker_timeout` has too.
    word_timeout_s = max(config.worker_timeout, min(collective_s, 1e6))
    return RankResources(cores=cores, ranks_on_host=ranks_on_host or len(places), word_timeout_s=word_timeout_s)


def _arena_sizes(
    config: ZenFlowConfig, part: RankPart, n_blocks: int, n_threads: int, schedules: Sequence[UpdateSchedule]
) -> ArenaSizes:
    """Of an arena for any of the schedules and the changes between them."""
    in_backward, in_place = config.submits_in_backward, part.in_place
    staggered = [
        StaggeredSchedule(**asdict(schedule), n_blocks=n_blocks, in_backward=in_backward, in_place=in_place)
        for schedule in with_changes(schedules)
    ]
    return ArenaSizes(
        n_step_records=max(s.n_step_records for s in staggered),
        n_slots=max(s.n_slots for s in staggered),
        n_publish_buffers=max(s.n_publish_buffers for s in staggered),
        dtype=part.weights[0].dtype,
        moments_dtype=getattr(torch, config.moments_dtype),
        n_threads=n_threads,
        newest_first=in_place,
    )


def build(config: ZenFlowConfig, part: RankPart, resources: RankResources) -> StepParts:
    """Plans the memory, checks that all ranks have it, and makes the components; the caller closes worker and arena.

    Raises:
        MisconfigurationException: this or another host has too little memory.
        WorkerError: the worker could not be started.
        RuntimeError: another rank has failed, whose error is in the message.
    """
    assert config.is_immediate or not part.in_place, "`with_weights_on_host` comes before"
    # Padding included.
    numels = [master.numel() for master in part.masters]
    n_blocks = blocks_wanted(
        config.update_intervals, in_backward=config.submits_in_backward, numel=sum(numels), awaited_singly=part.in_place
    )
    # In place of whole memory pages, as publish buffers are, so that there is nothing between two of them.
    multiple = PAGE_BYTES // part.weights[0].dtype.itemsize if part.in_place else None
    partition = build_partition(part.slices, numels, n_blocks, multiple=multiple)
    sizes_for = partial(_arena_sizes, config, part, len(partition.blocks), len(resources.cores.cores))
    candidates = candidates_of(config.update_intervals, config.publish_lags)
    policy = _agree(config, candidates, lambda some: arena_bytes(partition, sizes_for(some)), resources.ranks_on_host)
    # For every schedule that the configuration allows: what is not used takes no memory.
    sizes = sizes_for(candidates)
    places = {name: place for place, name in enumerate(part.module_order or part.parameters)}
    order = last_arrivals(partition, [places[name] for name in part.parameters])
    # Blocks that the device owns from the start.
    n_residents = 0 if config.offload_ratio == "auto" else round((1 - config.offload_ratio) * len(partition.blocks))
    _refuse_lack_of_device_memory(config, partition, order[:n_residents], part)
    # Outermost, so that ranks that have built their parts release them if another one has not.
    with ExitStack() as undo:
        with raising_together(RuntimeError):
            parts = _make(config, part, resources, partition, sizes, policy, order, n_residents, undo)
        undo.pop_all()
    rank_zero_info(_description(config, parts.rank, policy.schedule, resources.cores))
    return parts


def _agree(
    config: ZenFlowConfig,
    candidates: list[UpdateSchedule],
    n_bytes: Callable[[Sequence[UpdateSchedule]], int],
    ranks_on_host: int,
) -> SchedulePolicy:
    """Returns a policy for the candidates that every rank has memory for; `n_bytes` of host memory are for a run with some of them."""
    # The state of an earlier fit may be garbage that has not been collected, and would count as taken.
    gc.collect()
    available = free_host_memory().n_bytes / ranks_on_host
    fitting = that_fit(candidates, lambda some: n_bytes(some) <= available)
    # The same on all ranks. Without any that fits, the check below says so.
    kept = in_common(fitting) or candidates
    policy = SchedulePolicy(kept)
    keys = ("update_interval", "publish_lag", "max_update_interval", "topk_ratio")
    with_values = ", ".join(f"{key}={getattr(config, key)!r}" for key in keys)
    problem = lack_of_host_memory(n_bytes([policy.schedule]), ranks=ranks_on_host, keys=with_values)
    # Before any rank has taken its memory.
    raise_together(None if problem is None else MisconfigurationException(problem), MisconfigurationException)
    left_out = [s for s in candidates if s not in kept]
    if names := [f"update_interval={s.update_interval}, publish_lag={s.publish_lag}" for s in left_out]:
        rank_zero_info(f"ZenFlow: auto leaves out what host memory has no room for: {'; '.join(names)}")
    return policy


def _refuse_lack_of_device_memory(
    config: ZenFlowConfig, partition: Partition, numbers: Sequence[int], part: RankPart
) -> None:
    """Raises MisconfigurationException on all ranks if the device of one has no memory for the blocks with these numbers."""
    runtime = runtime_of(part.device)
    # That of the engine's start.
    runtime.forget_peak()
    room = max(0.0, runtime.room())
    sizes = resident_bytes(partition, numbers, part.weights[0].dtype)
    problem = None
    if (n_fitting := n_that_fit(sizes, room)) < len(sizes):
        least = math.ceil(100 * (1 - n_fitting / len(partition.blocks))) / 100
        problem = MisconfigurationException(
            f"offload_ratio must be at least {least:g} here, where {room / 2**30:.1f} GiB of device memory are free before the first step,"
            f" got {config.offload_ratio}, which takes {sum(sizes) / 2**30:.1f} GiB; leave room for activations as well"
        )
    raise_together(problem, MisconfigurationException)


def _make(
    config: ZenFlowConfig,
    part: RankPart,
    resources: RankResources,
    partition: Partition,
    sizes: ArenaSizes,
    policy: SchedulePolicy,
    order: Sequence[int],
    n_residents: int,
    undo: ExitStack,
) -> StepParts:
    """Makes the components, in the order in which one needs another; `undo` releases them. The first `n_residents` blocks of
    `order`, that of `last_arrivals`, begin on the device.
    """
    cores = resources.cores.cores
    arena = Arena(partition, sizes, device=part.device, cores=cores)
    undo.callback(arena.close, keep_state=False)
    weights = part.weights
    if part.in_place:
        places = zip(partition.group_begins, weights, strict=True)
        weights = [arena.publish.view(-1).narrow(0, begin, of_group.numel()) for begin, of_group in places]
    telemetry = Telemetry(part.device)
    # Before anything is written to the states: their memory comes from the NUMA node of the thread that touches it first.
    worker = SupervisedWorker(
        partial(Worker, arena, cores=cores, timeout_s=config.worker_timeout, word_timeout_s=resources.word_timeout_s),
        max_restarts=config.max_worker_restarts,
        telemetry=telemetry,
    )
    undo.callback(lambda: worker.current.kill())
    rank = RankState(
        partition=partition,
        blocks=Blocks(partition),
        arena=arena,
        worker=worker,
        weights=weights,
        in_place=part.in_place,
        device=part.device,
        kernels=kernels_for(part.device),
        telemetry=telemetry,
        d2h=SideStream(part.device),
        group=part.group,
        trained=dict.fromkeys(range(len(partition.slices)), 0),
    )
    host_state = HostState(part.optimizer, part.masters, partition=partition, arena=arena)
    if part.in_place and part.release_weights is not None:
        part.release_weights()
    jobs = JobQueue(config, rank, policy.schedule)
    residents = Residents(rank, jobs, order)
    residents.take(n_residents)
    if len(residents.blocks) < n_residents:
        raise RuntimeError(f"offload_ratio={config.offload_ratio}: the device has run out of memory; set a larger one")
    if part.in_place:
        # Their memory has been reserved by now.
        for of_group, begin in zip(weights, partition.group_begins, strict=True):
            of_group.copy_(arena.master.narrow(0, begin, of_group.numel()))
    selector = Selector(config, list(map(row_length, part.shapes.values())), rank.device)
    ownership = Ownership(rank)
    compensation = config.compensation
    provisional = ProvisionalUpdate(rank, compensation) if compensation.updates_provisionally else None
    fill = Fill(config, rank, jobs, ownership, provisional)
    moves = OwnerMoves(rank, residents, ownership, moves=config.offload_ratio == "auto")
    control = ScheduleControl(policy, rank, moves.shares) if config.measures or moves.watches else None
    planner = Planner(config, jobs, control, selector)
    return StepParts(
        rank=rank,
        jobs=jobs,
        ownership=ownership,
        residents=residents,
        moves=moves,
        provisional=provisional,
        fill=fill,
        selector=selector,
        planner=planner,
        host_state=host_state,
    )


def _description(config: ZenFlowConfig, rank: RankState, schedule: UpdateSchedule, cores: WorkerCores) -> str:
    ratio = 1 if config.offload_ratio == "auto" else config.offload_ratio
    first = {**asdict(schedule), "offload_ratio": ratio}
    begins = [f"{key}={value:g}{' (auto)' if getattr(config, key) == 'auto' else ''}" for key, value in first.items()]
    if "topk_ratio" in config.model_fields_set and config.owned_ratio < config.topk_ratio:
        begins.append(f"topk_ratio={config.topk_ratio:g} without effect, as no weight is ever late")
    return (
        f"ZenFlow: {sum(s.numel for s in rank.partition.slices):,} parameters on this rank; {', '.join(begins)}; worker on cores"
        f" {list(cores.cores)}; {rank.arena.reserved_bytes / 2**30:.2f} GiB of shared host memory"
    )
