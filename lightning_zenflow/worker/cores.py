"""Choice of the cores that the worker's threads run on. Pure; `lightning_zenflow.worker.topology` reads the machine."""

from collections.abc import Sequence
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
    """Threads of a trainer on the CPU: one for each core of the rank's share that the worker leaves, at least one. More would compete with
    the worker, and OpenMP waits for the slowest thread."""


def worker_cores(
    request: str | int | Sequence[int], *, places: Sequence[Place], index: int, reserved_share: float
) -> WorkerCores:
    """Chooses the cores of one rank's worker.

    1. The rank's *candidates* are its allowed cores on its GPU's NUMA node, or all allowed cores if there are none. Ranks whose candidates
       overlap divide them evenly.
    2. A control group's limit on CPU time bounds the share; the ranks of the host divide it evenly.
    3. The trainer keeps `reserved_share` of the rank's share; the worker gets the others, at least one.

    The trainer is not pinned: its threads and data loaders find the free cores.

    Args:
        request: "auto"; or the number of cores, which may exceed the share: other allowed cores follow; or the cores of all ranks of the
            host: rank r gets the r-th of equal parts of the list, or one core in turn if there are fewer cores than ranks.
        places: places of the host's ranks.
        index: index of the rank in `places`.
        reserved_share: share of a rank's cores for the trainer, 0 to 1 (DeepSpeed's `pt_reserved_cores_perc`).

    Raises:
        ValueError: a requested core is not allowed, or there are fewer cores than requested.
    """
    place = places[index]
    allowed, candidates = place.allowed, _candidates(place)
    sharers = [i for i, other in enumerate(places) if not set(candidates).isdisjoint(_candidates(other))]
    share = _part(candidates, sharers.index(index), len(sharers))
    limit = place.cpu_limit / len(places)
    mine = share[-max(1, int(limit)) :] if limit < len(share) else share
    if isinstance(request, str):
        cores = mine[-max(1, len(mine) - round(reserved_share * len(mine))) :]
        reason = "on the GPU's NUMA node" if set(candidates) <= set(place.gpu_cores) else "a share of the allowed cores"
        if mine != share:
            reason += f", limited by a control group to {limit:g} CPUs for this rank"
    elif isinstance(request, int):
        if request > len(allowed):
            raise ValueError(
                f"ZenFlowConfig: worker_cores must be at most {len(allowed)}, the number of cores this process may use, got {request}"
            )
        cores = sorted(list(dict.fromkeys([*reversed(share), *reversed(candidates), *reversed(allowed)]))[:request])
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


def _part(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list; one core in turn if there are fewer cores than ranks."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]
