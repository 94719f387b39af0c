"""Choice of the cores that the worker's threads run on. Pure; `lightning_zenflow.worker.topology` reads the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_zenflow.worker.topology import Place


@dataclass(frozen=True, kw_only=True)
class WorkerCores:
    """Cores of one rank's worker."""

    cores: tuple[int, ...]
    """Logical cores, one thread each."""
    reason: str
    """Why these, for the log."""
    trainer_threads: int
    """Threads of a trainer on the CPU: one for each physical core of the rank's share that the worker leaves, at least one. More would
    compete with the worker, and OpenMP waits for the slowest thread."""


def worker_cores(
    request: str | int | Sequence[int],
    *,
    places: Sequence[Place],
    index: int,
    siblings: Mapping[int, tuple[int, ...]],
    reserved_share: float,
) -> WorkerCores:
    """Chooses the cores of one rank's worker.

    1. The rank's *candidates* are its allowed cores on its GPU's socket, or all allowed cores if there are none.
    2. The physical cores of the candidates are divided evenly among the ranks with the same candidates; ranks whose candidates overlap
       without being the same may get the same core.
    3. A control group's limit on CPU time bounds the share; ranks in one group divide its limit evenly.
    4. The trainer keeps `reserved_share` of the rank's share; the worker gets one logical core of each other physical core, at least one.

    The trainer is not pinned: its threads and data loaders find the free cores.

    Args:
        request: "auto"; or the number of cores, which may exceed the share: further physical cores follow, those of the GPU's socket first,
            then second logical cores; or the cores of all ranks of the host: rank r gets the r-th of equal parts of the list, or
            one core in turn if there are fewer cores than ranks.
        places: places of the host's ranks.
        index: index of the rank in `places`.
        siblings: for each allowed core the logical cores of the same physical core.
        reserved_share: share of a rank's physical cores for the trainer, 0 to 1 (DeepSpeed's `pt_reserved_cores_perc`).

    Raises:
        ValueError: a requested core is not allowed, or there are fewer cores than requested.
    """
    place = places[index]
    allowed = place.allowed
    candidates = _candidates(place)
    sharers = [i for i, other in enumerate(places) if not set(candidates).isdisjoint(_candidates(other))]
    share = _part(_one_per_physical_core(candidates, siblings), sharers.index(index), len(sharers))
    quota = _cpus(places, place)
    mine = share[-max(1, int(quota)) :] if quota < len(share) else share
    if isinstance(request, str):
        cores = mine[-max(1, len(mine) - round(reserved_share * len(mine))) :]
        near = set(candidates) <= set(place.gpu_cores)
        reason = "on the GPU's socket" if near else "a share of the allowed cores"
        if mine != share:
            reason += f", limited by a control group to {quota:g} CPUs for this rank"
    elif isinstance(request, int):
        if request > len(allowed):
            raise ValueError(
                f"ZenFlowConfig: worker_cores must be at most {len(allowed)}, the number of cores this process may use, got {request}"
            )
        in_order = [*reversed(share), *_by_distance(allowed, place, siblings)]
        cores = sorted(list(dict.fromkeys(in_order))[:request])
        reason = "number given by worker_cores"
    else:
        forbidden = sorted(set(request) - set(allowed))
        if forbidden:
            raise ValueError(
                f"ZenFlowConfig: worker_cores must be cores this process may use, which are {list(allowed)}, got {list(request)};"
                f" remove {forbidden}"
            )
        cores = _part(list(request), index, len(places))
        reason = "given by worker_cores"
    return WorkerCores(cores=tuple(cores), reason=reason, trainer_threads=max(1, len(mine) - len(cores)))


def _candidates(place: Place) -> list[int]:
    near = set(place.gpu_cores)
    return [core for core in place.allowed if core in near] or list(place.allowed)


def _cpus(places: Sequence[Place], place: Place) -> float:
    """CPUs whose time a rank gets: an even part of each control group's limit."""
    parts = [quota.cpus / sum(quota in other.quotas for other in places) for quota in place.quotas]
    return min(parts, default=float("inf"))


def _by_distance(allowed: Sequence[int], place: Place, siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """All allowed cores: one per physical core, then the others; each in the order of nearness to the GPU, the last ones first."""
    first, near = set(_one_per_physical_core(allowed, siblings)), set(place.gpu_cores)
    return sorted(allowed, key=lambda core: (core not in first, core not in near, -core))


def _one_per_physical_core(cores: Sequence[int], siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """The first logical core of each physical core, in order."""
    chosen: list[int] = []
    taken: set[int] = set()
    for core in cores:
        if core not in taken:
            chosen.append(core)
            taken.update(siblings[core])
    return chosen


def _part(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list; one core in turn if there are fewer cores than ranks."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]
