"""Names the ranks that are gone when communication between ranks fails; torch's error names an address at most."""

import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in torch's type information
from torch.distributed.distributed_c10d import _get_default_store

from lightning_zenflow.worker.topology import read_file

_END_S = 3.0
"""Connections are closed before a process has ended, and processes that are killed together do not end at the same instant."""
_SETTLE_S = 3.0
"""Time for the other ranks to see the error too, and to report."""
_CONNECT_S = 5.0
"""For the connection to the store."""
_LOST = "\nLost: "


@dataclass(frozen=True)
class _Rank:
    node: int
    processes: str
    """Identity of the process numbers: ranks of a node with the same one see each other's processes."""
    host: str = field(default_factory=lambda: os.uname().nodename)
    pid: int = field(default_factory=os.getpid)
    training: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A random name; that of rank 0 is the training's."""

    def is_running(self) -> bool:
        """Whether the process runs, by its number."""
        state = read_file(Path(f"/proc/{self.pid}/stat")).rpartition(")")[2].split()[:1]
        return bool(state) and state[0] not in ("Z", "X")


class LostRanks:
    """Finds the ranks that have ended, or whose host cannot be reached. All ranks construct it together.

    Nothing runs or listens until communication fails. Then every rank that sees the error looks which processes of its host still run, and
    reports them in the store by which torch's ranks have found each other. Ranks without a report are lost. The store lives in rank 0
    or, under torchrun, in the agent of its node: if it does not answer, the ranks of that node are lost.

    Args:
        node: number of this rank's node.
    """

    def __init__(self, node: int) -> None:
        namespace = read_file(Path("/proc/sys/kernel/random/boot_id")) + os.readlink("/proc/self/ns/pid")
        self._own = _Rank(node, f"{node} {namespace}")
        self._ranks: list[_Rank] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        # Private: torch has no public way to the store of the default group.
        store = _get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            self._address = store.host, store.port
            self._ranks = [self._own] * dist.get_world_size()
            dist.all_gather_object(self._ranks, self._own)

    def explain(self, error: BaseException) -> None:
        """Adds the lost ranks, if any, to the message of an error of torch's communication; leaves all other errors as they are."""
        is_of_communication = isinstance(error, dist.DistError) or "gloo" in str(error)
        # An inner context may have explained it.
        if not self._ranks or not is_of_communication or _LOST in str(error):
            return
        reported: set[int] = set()
        # A host that does not answer at all makes the store's calls wait for longer than their timeout.
        asking = threading.Thread(target=self._ask, args=(reported,), daemon=True)
        asking.start()
        asking.join(_END_S + _SETTLE_S + _CONNECT_S)
        if not reported:
            gone = self._ranks[0].processes, self._own.processes
            reported = self._running() | {i for i, rank in enumerate(self._ranks) if rank.processes not in gone}
        nodes: dict[str, list[str]] = {}
        for i, rank in enumerate(self._ranks):
            if i not in reported:
                nodes.setdefault(f"node {rank.node} (host {rank.host})", []).append(str(i))
        if nodes:
            names = " and ".join(f"rank {', '.join(of_node)} of {node}" for node, of_node in nodes.items())
            error.args = (
                f"{error}{_LOST}{names}. What has ended says why in its own output; what still runs cannot be reached. Continue from the"
                " last checkpoint, also on fewer nodes or ranks",
            )

    def _running(self) -> set[int]:
        """The ranks on this host whose processes run."""
        return {i for i, r in enumerate(self._ranks) if r.processes == self._own.processes and r.is_running()}

    def _ask(self, reported: set[int]) -> None:
        """Reports this host's ranks, waits for the others' reports, and adds all of them to `reported`; adds none without the store."""
        try:
            store = TCPStore(*self._address, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
            time.sleep(_END_S)
            key = f"zenflow/running/{self._ranks[0].training}"
            running = "".join(f"{rank} " for rank in self._running())
            store.append(key, running)  # type: ignore[attr-defined]  # missing there, too
            time.sleep(_SETTLE_S)
            reported.update(map(int, store.get(key).split()))
        except RuntimeError:
            return
