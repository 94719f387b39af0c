"""Collectives of the simulated accelerator's ranks: as on GPUs, they take time of the device and of a link, and none of the host's cores.

Every rank computes the same prepared gradients: their mean is the rank's own. Reductions, which a GPU hides behind backward, are therefore
left out, and so is their division by the number of ranks (`MeanIsOwn`). The gather of the ranks' weights at the end of a step takes its
bytes' time on the link; what it would copy is left out, since the simulated device does not read weights. Small tensors, and what the
ranks agree on, really are exchanged.
"""

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

NAME = "simulated"

LINK_BYTES_PER_S = 25e9
"""Between two devices, in each direction: PCIe 4.0 x16."""

_SMALL = 1 << 16
"""Elements up to which tensors really are exchanged."""


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
