"""Links of the simulated accelerator: as on GPUs, what they move takes time of the device and of the link, and none of the host's cores.

Collectives of its ranks: every rank computes the same prepared gradients, so their mean is the rank's own. Reductions, which a GPU hides
behind backward, are therefore left out, and so is their division by the number of ranks (`MeanIsOwn`). The gather of the ranks' weights at
the end of a step takes its bytes' time on the link; what it would copy is left out, since the simulated device does not read weights. Small
tensors, and what the ranks agree on, really are exchanged.

Fetches of stage 3 with parameters in host memory (`HostLink`): DeepSpeed starts them ahead of the layers that need them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_zenflow.deepspeed.fetch import Fetched

NAME = "simulated"

LINK_BYTES_PER_S = 25e9
"""Between two devices, in each direction: PCIe 4.0 x16."""

_SMALL = 1 << 16
"""Elements up to which tensors really are exchanged."""


class HostLink:
    """The link over which one rank's device fetches parameters from host memory: one copy after the other, on a stream of DeepSpeed's.

    As on a GPU, the host waits before a layer runs until the stream has done all that DeepSpeed has started before, also for layers that
    come later; with `ZenFlowStrategy` the layer waits for its own fetch, for which the host waits here. The device computes meanwhile, if
    it is asynchronous.

    Args:
        bytes_per_s: of the link.

    Attributes:
        n_bytes: fetched so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.n_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._idle_at = 0.0
        self._done_at: dict[int, float] = {}  # of each parameter, by its identity

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which fetches take the link's time."""
        # Private: starts the fetch of parameters of which the rank has all.
        start = partition_parameters._no_gather_coalesced

        def started(parameters: Iterable[Any]) -> "_Fetch":
            parameters = list(parameters)
            n_bytes = sum(p.ds_tensor.nbytes for p in parameters)
            self.n_bytes += n_bytes
            self._idle_at = max(self._idle_at, time.perf_counter()) + n_bytes / self._bytes_per_s
            self._done_at.update(dict.fromkeys(map(id, parameters), self._idle_at))
            return _Fetch(start(parameters), lambda: _sleep_until(self._idle_at))

        wait = Fetched.wait

        def waited(fetched: Fetched, **options: Any) -> None:
            _sleep_until(max((self._done_at[id(p)] for p in fetched._parameters), default=0.0))
            wait(fetched, **options)

        with (
            mock.patch.object(partition_parameters, "_no_gather_coalesced", started),
            mock.patch.object(Fetched, "wait", waited),
        ):
            yield


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class _Fetch:
    """DeepSpeed's handle of a fetch."""

    def __init__(self, handle: Any, wait_for_link: Callable[[], None]) -> None:
        self._handle, self._wait_for_link = handle, wait_for_link

    def wait(self, **options: Any) -> None:
        """The host waits; `options` are DeepSpeed's."""
        self._wait_for_link()
        self._handle.wait(**options)


def own_gradients(tensors: Iterable[Tensor], *_: Any) -> list[Tensor]:
    """DeepSpeed's reduction of stage 3 on one rank, which would divide them by one and copy them."""
    return [t.detach().view(-1) for t in tensors]


class MeanIsOwn(pl.Callback):
    """Omits DeepSpeed's division of each bucket."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, DeepSpeedStrategy)
        trainer.strategy.deepspeed_engine.optimizer.gradient_average = False


class _Done(dist.Work):
    """An operation that is complete."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Returns at once."""
        return True

    def get_future(self) -> Future[Any]:
        """A future that is complete."""
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class SimulatedGroup(dist.ProcessGroup):
    """Ranks of simulated accelerators. See the module.

    Args:
        store: of the rendezvous.
        rank: of this process.
        size: number of ranks.
        timeout: of an exchange.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._exchange = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._others = (size - 1) / size

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Of small tensors what `opts` say; of large ones, whose division is omitted, the mean over the ranks."""
        if tensors[0].numel() <= _SMALL:
            return self._exchange.allreduce(tensors, opts)
        return _Done()

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """The mean over the ranks."""
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Broadcast; large tensors are equal already."""
        return self._exchange.broadcast(tensors, opts) if tensors[0].numel() <= _SMALL else _Done()

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Gather of parts of one tensor."""
        if output.numel() <= _SMALL:
            return self._exchange._allgather_base(output, source, opts or dist.AllgatherOptions())
        self._exchange.barrier(dist.BarrierOptions()).wait()
        time.sleep(self._others * output.nbytes / LINK_BYTES_PER_S)
        return _Done()

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather of tensors of each rank."""
        return self._exchange.allgather(outputs, sources, opts or dist.AllgatherOptions())

    def barrier(self, opts: Any = None) -> dist.Work:
        """Barrier."""
        return self._exchange.barrier(opts or dist.BarrierOptions())


def register() -> None:
    """Makes torch know the backend "simulated"."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, SimulatedGroup, devices=["cpu"])
