"""Where the exact fp32 state of device-owned entries lives: on the device, or in host memory, from where it visits the device.

Both kinds have one interface, and give the same bits: what is computed on is the same on the device in either case.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override


class ColumnState(ABC):
    """Master weights and moments of n entries: [3, n] float32.

    Args:
        values: the state, where it lives.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def numel(self) -> int:
        """Entries n."""
        return self._values.shape[1]

    @abstractmethod
    def where_it_lives(self) -> Tensor:
        """[3, n], for reading and writing between visits. Waits for the device where it still copies from or to host memory."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Tensor]:
        """[3, n] on the device, in stream order. What is changed in place within the context is kept; no reference may outlive it."""

    @abstractmethod
    def master_on_device(self) -> Tensor:
        """[n], the master weights on the device, in stream order; to be read only."""


class ResidentState(ColumnState):
    """State that stays on the device: 12 bytes an entry of its memory.

    Args:
        numel: entries n.
        device: where it stays.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(torch.empty(3, numel, device=device))

    @override
    def where_it_lives(self) -> Tensor:
        return self._values

    @override
    def on_device(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self._values)

    @override
    def master_on_device(self) -> Tensor:
        return self._values[0]


class VisitingState(ColumnState):
    """State in host memory, page-locked where the device is CUDA; on the device only during a visit.

    Visits are copies in stream order, and the training thread does not wait for them. All of them run on the stream of the optimizer
    step, so the copy back of one visit precedes the copy in of the next. The host itself reads and writes the memory at
    selections and flushes only; it first waits for the last visit's copies. Memory that is given up during a visit is reused by torch's
    allocator after its copies only.

    Args:
        numel: entries n.
        device: what it visits.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(torch.empty(3, numel, pin_memory=device.type == "cuda"))
        self._device = device
        self._last_visit: torch.cuda.Event | None = None

    @override
    def where_it_lives(self) -> Tensor:
        if self._last_visit is not None:
            self._last_visit.synchronize()
        return self._values

    @override
    @contextmanager
    def on_device(self) -> Iterator[Tensor]:
        visiting = self._copy_in(self._values)
        yield visiting
        self._values.copy_(visiting, non_blocking=True)
        self._end_visit()

    @override
    def master_on_device(self) -> Tensor:
        master = self._copy_in(self._values[0])
        self._end_visit()
        return master

    def _copy_in(self, values: Tensor) -> Tensor:
        # Not `Tensor.to`, which returns the tensor itself where the device is the CPU.
        return torch.empty_like(values, device=self._device).copy_(values, non_blocking=True)

    def _end_visit(self) -> None:
        if self._device.type == "cuda":
            if self._last_visit is None:
                self._last_visit = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last_visit.record(torch.cuda.current_stream(self._device))
