"""Names the ranks that are gone when communication between ranks fails; torch's error names an address at most."""

import errno
import os
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lightning_zenflow.worker.fork_safety import keep_from_children
from lightning_zenflow.worker.topology import read_file

_FIRST_TIMEOUT_S = 1.0
_TIMEOUT_S = 5.0
"""For connections to hosts that do not answer at all."""
_SETTLE_S = 1.0
"""Processes that are killed together do not end at the same instant."""
_LOST = "\nLost: "
_QUEUE = Path("/proc/sys/net/core/somaxconn")


@dataclass(frozen=True, kw_only=True)
class _Rank:
    node: int
    host: str
    address: tuple[int, str, int] | None
    """Address family, host and port of its listening socket; None if it has none."""


class LostRanks:
    """Finds the ranks that have ended, or whose host cannot be reached. All ranks construct it together.

    Each rank has a listening TCP socket, which accepts nothing: the kernel answers connections for as long as the process keeps it open,
    however busy or stopped the process is, and refuses them afterwards. Ranks that could not be reached at the start, as behind a
    firewall, are never called lost.

    Args:
        node: number of this rank's node.
    """

    def __init__(self, node: int) -> None:
        self._socket: socket.socket | None = None
        self._ranks: list[_Rank] = []
        self._reachable: set[int] = set()
        self._is_cause = True
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            return
        # Every rank connects to every other one twice; a full queue would look like a lost rank.
        fits = 2 * world_size <= int(read_file(_QUEUE) or 128)
        own = _Rank(node=node, host=os.uname().nodename, address=self._listen(2 * world_size) if fits else None)
        ranks: list[_Rank | None] = [None] * world_size
        dist.all_gather_object(ranks, own)
        self._ranks = [rank for rank in ranks if rank is not None]
        self._reachable = self._answering(range(world_size), _FIRST_TIMEOUT_S)

    def explain(self, error: BaseException) -> None:
        """Adds the lost ranks, if any, to the message of an error of torch's communication; leaves all other errors as they are."""
        if not self._reachable or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return
        if _LOST in str(error):  # an inner context has explained it
            return
        # This rank fails for another one's sake; those that ask after it has ended shall not take it for the cause.
        self._is_cause = False
        time.sleep(_SETTLE_S)
        lost = sorted(self._reachable - self._answering(self._reachable, _TIMEOUT_S))
        nodes: dict[str, list[str]] = {}
        for rank in lost:
            nodes.setdefault(f"node {self._ranks[rank].node} (host {self._ranks[rank].host})", []).append(str(rank))
        if lost:
            names = " and ".join(f"rank {', '.join(of_node)} of {node}" for node, of_node in nodes.items())
            error.args = (
                f"{error}{_LOST}{names}. What has ended says why in its own output; what still runs cannot be reached. Continue from the"
                " last checkpoint, also on fewer nodes or ranks",
            )

    def close(self) -> None:
        """Ends it: from now on the other ranks take this one for lost, unless it fails for another one's sake. Idempotent."""
        self._reachable = set()
        if self._socket is not None and self._is_cause:
            self._socket.close()

    def _listen(self, queue: int) -> tuple[int, str, int] | None:
        """Listens at the address by which this host reaches rank 0's."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect(address)
                host = route.getsockname()[0]
            self._socket = socket.create_server((host, 0), family=family, backlog=queue)
        except (OSError, KeyError, ValueError):
            return None
        keep_from_children(self._socket)
        return int(family), host, self._socket.getsockname()[1]

    def _answering(self, ranks: Iterable[int], timeout_s: float) -> set[int]:
        """Those of the given ranks that answer a connection."""
        waiting: dict[int, tuple[int, socket.socket]] = {}
        answering = set()
        poll = select.poll()
        for rank in ranks:
            address = self._ranks[rank].address
            if address is not None:
                connection = socket.socket(address[0], socket.SOCK_STREAM)
                connection.setblocking(False)
                if connection.connect_ex(address[1:]) in (0, errno.EINPROGRESS):
                    poll.register(connection, select.POLLOUT)
                    waiting[connection.fileno()] = rank, connection
                else:  # no route, as where this host's own network is down
                    connection.close()
        deadline = time.monotonic() + timeout_s
        while waiting and (events := poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))):
            for fd, _ in events:
                rank, connection = waiting.pop(fd)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    answering.add(rank)
                poll.unregister(fd)
                connection.close()
        for _, connection in waiting.values():
            connection.close()
        return answering
