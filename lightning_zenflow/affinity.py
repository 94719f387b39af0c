"""Which cores the worker's threads run on. `worker_cores` is pure; `allowed_cores` and `core_siblings` read the machine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def allowed_cores() -> list[int]:
    """Cores this process may run on: respects ``taskset``, cgroup cpusets and DeepSpeed's core binding."""
    return sorted(os.sched_getaffinity(0))


def core_siblings(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> dict[int, tuple[int, ...]]:
    """For each core, the logical cores that share its physical core; itself alone where the system does not say."""
    siblings = {}
    for core in cores:
        try:
            text = (root / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            text = str(core)
        siblings[core] = tuple(_parse_core_list(text))
    return siblings


def _parse_core_list(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def worker_cores(
    request: str | int | Sequence[int],
    *,
    allowed: Sequence[int],
    siblings: Mapping[int, tuple[int, ...]],
    reserved_share: float,
    local_rank: int,
    local_world_size: int,
) -> list[int]:
    """The cores of one rank's worker, one thread each.

    The host's physical cores are dealt out evenly to its ranks; of a rank's share the trainer keeps `reserved_share` and the worker
    takes the rest, one logical core of each physical one, at least one. The trainer itself is not pinned: its main thread and its
    data loaders find the free cores, and nothing changes for the user's other libraries.

    Args:
        request: "auto"; or the number of cores; or the cores themselves, of all ranks of the host: rank r takes the r-th equal share of the
            list, or one of its cores in turn where there are fewer cores than ranks.
        allowed: logical cores this process may use.
        siblings: see `core_siblings`.
        reserved_share: share of a rank's physical cores left to the trainer, 0 to 1 (DeepSpeed's `pt_reserved_cores_perc`).
        local_rank: this rank's number on its host.
        local_world_size: ranks on this host.

    Raises:
        ValueError: a requested core is not among the allowed ones, or more cores are asked for than there are.
    """
    if not isinstance(request, str | int):
        forbidden = sorted(set(request) - set(allowed))
        if forbidden:
            raise ValueError(
                f"ZenFlowConfig: worker_cores={list(request)}: allowed are the cores this process may run on, {list(allowed)};"
                f" {forbidden} are not among them"
            )
        return _share(list(request), local_rank, local_world_size)
    physical = _first_of_each(allowed, siblings)
    mine = _share(physical, local_rank, local_world_size)
    if isinstance(request, int):
        if request > len(allowed):
            raise ValueError(
                f"ZenFlowConfig: worker_cores={request}: allowed is a number from 1 to {len(allowed)}, the cores this process may use"
            )
        # Physical cores from the end of the rank's share first, then whatever else is allowed.
        others = [core for core in reversed(allowed) if core not in mine]
        return sorted([*reversed(mine), *others][:request])
    count = max(1, len(mine) - round(reserved_share * len(mine)))
    return mine[-count:]


def trainer_threads(
    n_worker_cores: int, *, allowed: Sequence[int], siblings: Mapping[int, tuple[int, ...]], local_world_size: int
) -> int:
    """Threads of a rank whose model trains on the CPU: one for each physical core that is left beside its worker, at least one.

    More would compete with the worker, and OpenMP's threads wait for the slowest among them.
    """
    return max(1, len(_first_of_each(allowed, siblings)) // local_world_size - n_worker_cores)


def _first_of_each(allowed: Sequence[int], siblings: Mapping[int, tuple[int, ...]]) -> list[int]:
    """One logical core of each physical core, in order."""
    chosen: list[int] = []
    taken: set[int] = set()
    for core in allowed:
        if core not in taken:
            chosen.append(core)
            taken.update(siblings[core])
    return chosen


def _share(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list; with fewer cores than ranks, one core in turn."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]
