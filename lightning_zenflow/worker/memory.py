"""Whether a host has room for the arenas of its ranks, found out before anything is trained.

Shared memory is handed out by the page, when it is first written: without this check a host that is too small would end the run later, by
the kernel's killing something.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_zenflow.worker.topology import control_groups

_log = logging.getLogger(__name__)

_ROOT = Path("/")

_CGROUP_FILES = {
    # limit, usage, and the page cache's lines of memory.stat, which the kernel takes back when memory is needed
    "v2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that can still be taken."""

    n_bytes: int
    limit: str
    """What limits it, for a message."""


def available(root: Path | None = None) -> Room | None:
    """The least of what the machine and this process' control groups have left; None where the system does not say.

    Args:
        root: where the machine's files lie; None: where they do.
    """
    return min(_rooms(root or _ROOT), key=lambda room: room.n_bytes, default=None)


def check_host_memory(*, first: int, largest: int, ranks: int, keys: str, root: Path | None = None) -> str | None:
    """What is wrong if the arenas of this host's ranks do not fit, or None; warns where they do not fit at their largest.

    Args:
        first: bytes of one rank's arena at the start.
        largest: the same with the largest S and d that "auto" may take; what exceeds `first` is taken when it is needed.
        ranks: on this host, each with an arena of its own.
        keys: the keys that decide on these sizes, and their values, as "update_interval='auto', ...".
        root: where the machine's files lie; None: where they do.
    """
    room = available(root)
    if room is None:
        return None
    advice = f"; smaller values of {keys} need less, down to 12 bytes a parameter for master weights and moments; so do more hosts"
    if ranks * first > room.n_bytes:
        return (
            f"ZenFlow needs {_gib(ranks * first)} of host memory for the optimizer states and gradients of {ranks} rank(s) on this host,"
            f" but {_gib(room.n_bytes)} are available ({room.limit}){advice}"
        )
    if ranks * largest > room.n_bytes:
        _log.warning(
            "ZenFlow may come to need %s of host memory for %d rank(s) on this host, of which %s are available (%s)%s",
            _gib(ranks * largest),
            ranks,
            _gib(room.n_bytes),
            room.limit,
            advice,
        )
    return None


def _rooms(root: Path) -> Iterator[Room]:
    machine = _table(root / "proc/meminfo")
    if "MemAvailable:" in machine:
        yield Room(n_bytes=1024 * machine["MemAvailable:"], limit="MemAvailable of the machine")
    for version, group in control_groups("memory", root):
        limit_name, usage_name, cache_names = _CGROUP_FILES[version]
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None:
            statistics = _table(group / "memory.stat")
            cache = sum(statistics.get(name, 0) for name in cache_names)
            yield Room(n_bytes=max(0, limit - max(0, usage - cache)), limit=f"control group limit {group / limit_name}")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdigit()}


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB ({n_bytes} bytes)"


_RESERVE = 0.05
"""Share of the device's memory that is left alone: what the allocator loses between tensors, and batches that are longer."""


def has_room(n_bytes: float, device: torch.device) -> bool:
    """Whether so many bytes are free beside all that the device held at the same time so far; yes where the device is the host.

    To be asked in backward, when the device's memory has been as full as it gets.
    """
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return bool(free + unused >= n_bytes + _RESERVE * total)
