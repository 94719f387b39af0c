"""Which cores the worker's threads run on. Pure; `lightning_zenflow.worker.topology` reads the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_zenflow.worker.topology import Place


@dataclass(frozen=True, kw_only=True)
class WorkerCores:
    """The cores of one rank's worker, and why these."""

    cores: tuple[int, ...]
    """Logical cores, one thread each."""
    reason: str
    """For the log."""
    trainer_threads: int
    """Threads of the rank if its model trains on the CPU: one for each physical core of its share that is left beside the worker, at least
    one. More would compete with the worker, and OpenMP's threads wait for the slowest among them."""


def worker_cores(
    request: str | int | Sequence[int],
    *,
    places: Sequence[Place],
    index: int,
    siblings: Mapping[int, tuple[int, ...]],
    reserved_share: float,
) -> WorkerCores:
    """The cores of one rank's worker, one thread each.

    A rank's *candidates* are the cores it may use that are near its GPU; all it may use where there is no such core or none is known. Their
    physical cores are dealt out evenly to the ranks that have these candidates; then, where a socket has NUMA nodes without a rank's GPU,
    the cores of these to all ranks of the socket. Candidates that overlap without being the same are dealt out as if they were, so that
    two ranks may get the same core. Where a control group limits CPU time, its
    ranks' shares are no larger than an even part of that. Of a rank's share the trainer keeps `reserved_share` and the worker takes the
    rest, one logical core of each physical one, at least one. The trainer itself is not pinned: its main thread and its data loaders
    find the free cores, and nothing changes for the user's other libraries.

    Args:
        request: "auto"; or the number of cores, which may reach beyond the share: other physical cores follow it, those near the GPU first,
            then second logical cores; or the cores themselves, of all ranks of the host: rank r takes the r-th equal share of the
            list, or one of its cores in turn where there are fewer cores than ranks.
        places: those of the host's ranks.
        index: which of them is the rank's.
        siblings: for each core the rank may use, the logical cores that share its physical core.
        reserved_share: share of a rank's physical cores left to the trainer, 0 to 1 (DeepSpeed's `pt_reserved_cores_perc`).

    Raises:
        ValueError: a requested core is not among the allowed ones, or more cores are asked for than there are.
    """
    place = places[index]
    allowed = place.allowed
    candidates = _candidates(place)
    sharers = [i for i, other in enumerate(places) if not set(candidates).isdisjoint(_candidates(other))]
    share = _share(_first_of_each(candidates, siblings), sharers.index(index), len(sharers))
    # The last ones of a share are taken first.
    share = [*_rest_of_the_socket(places, index, siblings), *share]
    quota = _cpus(places, place)
    mine = share[-max(1, int(quota)) :] if quota < len(share) else share
    if isinstance(request, str):
        cores = mine[-max(1, len(mine) - round(reserved_share * len(mine))) :]
        reason = "near the GPU" if set(candidates) <= set(place.gpu_numa_cores) else "a share of those allowed"
        if mine != share:
            reason += f", limited by a control group to {quota:g} CPUs for this rank"
    elif isinstance(request, int):
        if request > len(allowed):
            raise ValueError(
                f"ZenFlowConfig: worker_cores={request}: allowed is a number from 1 to {len(allowed)}, the cores this process may use"
            )
        everything = [*reversed(share), *_by_distance(allowed, place, siblings)]
        cores = sorted(list(dict.fromkeys(everything))[:request])
        reason = "as many as worker_cores says"
    else:
        forbidden = sorted(set(request) - set(allowed))
        if forbidden:
            raise ValueError(
                f"ZenFlowConfig: worker_cores={list(request)}: allowed are the cores this process may run on, {list(allowed)};"
                f" {forbidden} are not among them"
            )
        cores = _share(list(request), index, len(places))
        reason = "by worker_cores"
    return WorkerCores(cores=tuple(cores), reason=reason, trainer_threads=max(1, len(mine) - len(cores)))


def _candidates(place: Place) -> list[int]:
    near = set(place.gpu_numa_cores)
    return [core for core in place.allowed if core in near] or list(place.allowed)


def _rest_of_the_socket(places: Sequence[Place], index: int, siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """The rank's part of its socket's physical cores that are no rank's candidates."""
    place = places[index]
    taken = {core for other in places for core in _candidates(other)}
    rest = [core for core in place.allowed if core in place.gpu_socket_cores and core not in taken]
    sharers = [i for i, other in enumerate(places) if not set(rest).isdisjoint(other.gpu_socket_cores)]
    if not sharers:
        return []
    return _run(_first_of_each(rest, siblings), sharers.index(index), len(sharers))


def _cpus(places: Sequence[Place], place: Place) -> float:
    """CPUs whose time a rank gets: of each limit an even part among the ranks below it."""
    parts = [quota.cpus / sum(quota in other.quotas for other in places) for quota in place.quotas]
    return min(parts, default=float("inf"))


def _by_distance(allowed: Sequence[int], place: Place, siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """All allowed cores: one of each physical core, then the others; of both those near the GPU first, and the last ones first."""
    first, near = set(_first_of_each(allowed, siblings)), set(place.gpu_numa_cores)
    return sorted(allowed, key=lambda core: (core not in first, core not in near, -core))


def _first_of_each(cores: Sequence[int], siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """One logical core of each physical core, in order."""
    chosen: list[int] = []
    taken: set[int] = set()
    for core in cores:
        if core not in taken:
            chosen.append(core)
            taken.update(siblings[core])
    return chosen


def _share(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list; with fewer cores than ranks, one core in turn."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return _run(cores, rank, ranks)


def _run(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list, which may be empty."""
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]
