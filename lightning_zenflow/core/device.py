"""The training device: streams, events, page-locked memory and memory counters.

All of the package asks this module, and not `torch.cuda`, so that a device of another kind is one more `HostRuntime` in `RUNTIMES`: the
tests add one that records the order of all operations.
"""

import functools
import logging
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

_log = logging.getLogger(__name__)

_RESERVE = 0.05
"""Share of the device's memory that stays free, for fragmentation and longer batches."""


class Event:
    """As `torch.cuda.Event`: a point in a stream's order; on the CPU one that everything precedes."""

    def query(self) -> bool:
        """Whether the device has reached the event."""
        return True

    def synchronize(self) -> None:
        """Waits until it has."""

    def elapsed_time(self, end_event: "Event", /) -> float:
        """Milliseconds between two events that were recorded with timing."""
        return 0.0


class Stream:
    """As `torch.cuda.Stream`: a queue of the device; on the CPU one that is always empty."""

    def wait_stream(self, stream: "Stream", /) -> None:
        """Orders later work of this stream behind the present end of another one."""

    def wait_event(self, event: Event, /) -> None:
        """Orders later work of this stream behind an event."""


class HostRuntime:
    """Operations on a device that are not operations on tensors: those of the CPU, which are done when the call returns. Other devices
    override them.
    """

    runs_behind = False
    """Whether the host enqueues work and goes on. Then order needs events. Copies to and from host memory are in the order of the stream.
    The host may wait for those of memory that is not page-locked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> Stream:
        """A new stream."""
        return Stream()

    def current_stream(self) -> Stream:
        """The stream that operations of this thread are enqueued on."""
        return Stream()

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes `stream` the current one in the context."""
        return nullcontext()

    def record_event(self, *, timing: bool = False) -> Event:
        """Records a new event on the current stream, with a timestamp for `Event.elapsed_time` if `timing`."""
        return Event()

    def synchronize(self) -> None:
        """Waits for all work of the device."""

    def keep_for(self, stream: Stream, tensor: Tensor) -> None:
        """Keeps the tensor's memory from being reused before the present work of `stream`."""

    def page_lock(self, address: int, n_bytes: int) -> None:
        """Page-locks host memory; RuntimeError: the system refuses."""

    def page_unlock(self, address: int) -> None:
        """Undoes `page_lock` of the range that begins at `address`."""

    def forget_peak(self) -> None:
        """Lets the peak of the device's memory begin anew."""

    def free_cached(self) -> None:
        """Gives memory that torch keeps for later use back to the system."""

    def allocated(self) -> tuple[int, int]:
        """Bytes of this process' tensors on the device: now, and at the peak since `forget_peak`."""
        return 0, 0

    def capacity(self, *, reserve: float = 1.0) -> float:
        """Bytes that `allocated` can be, but for a part of the device's reserve."""
        return math.inf

    def room(self) -> float:
        """Bytes that the device has had free at the peak since `forget_peak`, but for a reserve; to be asked behind a step's peak."""
        return self.capacity() - self.allocated()[1]

    def pci_address(self) -> str | None:
        """For example "0000:3b:00.0"; None: not known."""
        return None

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory, page-locked where the device runs behind and the system allows it."""
        if self.runs_behind:
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as refusal:
                warn_of_pageable_memory(str(refusal))
        return torch.empty(shape, dtype=dtype, device="cpu")


class CudaRuntime(HostRuntime):
    """A CUDA device."""

    runs_behind = True

    @override
    def new_stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    @override
    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.device))

    @override
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    @override
    def record_event(self, *, timing: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return cast(Event, event)

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @override
    def keep_for(self, stream: Stream, tensor: Tensor) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]

    @override
    def page_lock(self, address: int, n_bytes: int) -> None:
        try:
            self._check("cudaHostRegister", address, n_bytes, 0)
        except RuntimeError:
            # The runtime keeps the error for the next launch, which raises it again and thereby forgets it.
            with suppress(RuntimeError):
                torch.ones(1, dtype=torch.uint8, device=self.device)
            raise

    @override
    def page_unlock(self, address: int) -> None:
        self._check("cudaHostUnregister", address)

    @override
    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def free_cached(self) -> None:
        torch.cuda.empty_cache()

    @override
    def allocated(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    @override
    def capacity(self, *, reserve: float = 1.0) -> float:
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - reserve * _RESERVE * total

    @override
    def pci_address(self) -> str | None:
        properties = torch.cuda.get_device_properties(self.device)
        # Older releases of torch lack these fields.
        numbers = [int(getattr(properties, f"pci_{field}_id", -1)) for field in ("domain", "bus", "device")]
        return None if min(numbers) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*numbers)

    @staticmethod
    def _check(call: str, *arguments: int) -> None:
        error = int(getattr(torch.cuda.cudart(), call)(*arguments))  # type: ignore[no-untyped-call]
        if error != 0:
            raise RuntimeError(f"{call} failed with CUDA error {error}")


@functools.cache
@rank_zero_only
def warn_of_pageable_memory(refusal: str) -> None:
    """Warns once in a process, on rank 0."""
    _log.warning(
        "ZenFlow: host memory cannot be page-locked (%s); training goes on, but copies between the device and pageable memory make the"
        " training thread wait and do not overlap with computation. Raise the limit of locked memory: `ulimit -l unlimited`,"
        " `docker run --ulimit memlock=-1`, `LimitMEMLOCK=infinity` of systemd; WSL2 locks a part of its memory only",
        refusal.partition("\n")[0],
    )


RUNTIMES: dict[str, Callable[[torch.device], HostRuntime]] = {"cpu": HostRuntime, "cuda": CudaRuntime}
"""By type of the device."""


def runtime_of(device: torch.device) -> HostRuntime:
    """The runtime of a device; ValueError: there is none for its type."""
    if device.type not in RUNTIMES:
        raise ValueError(f"device must be of type {' or '.join(RUNTIMES)}, got {device}")
    return RUNTIMES[device.type](device)


PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""Of the system's memory; 64 KiB on some kernels for aarch64. What is page-locked apart shares no page."""


class SideStream:
    """A stream for copies beside the current stream. The host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._stream = self._runtime.new_stream()

    @contextmanager
    def behind(self, event: Event | None = None, *, reads: Tensor | None = None) -> Iterator[None]:
        """Makes this the current stream in the context, ordered behind an event; None: behind the present end of the current stream. Device
        memory that the context `reads` may be freed by its owner after it.
        """
        if event is None:
            self._stream.wait_stream(self._runtime.current_stream())
        else:
            self._stream.wait_event(event)
        with self._runtime.on(self._stream):
            yield
        if reads is not None:
            self._runtime.keep_for(self._stream, reads)

    def wait_for(self, event: Event) -> None:
        """Orders later work of this stream behind an event."""
        self._stream.wait_event(event)

    def record_event(self) -> Event:
        """Records a new event on this stream."""
        with self._runtime.on(self._stream):
            return self._runtime.record_event()

    def join(self) -> None:
        """Orders the current stream behind the present end of this one."""
        self._runtime.current_stream().wait_stream(self._stream)


class AsyncHostCopy:
    """Asynchronous copy of a device tensor to host memory, in the order of the current stream: its later work may overwrite the source."""

    def __init__(self, values: Tensor) -> None:
        runtime = runtime_of(values.device)
        self._values = runtime.empty_on_host(values.shape, values.dtype)
        self._values.copy_(values, non_blocking=True)
        self._copied = runtime.record_event()

    @property
    def arrived(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._copied.query()

    def read(self) -> Tensor:
        """Waits for the copy and returns it."""
        if not self.arrived:
            self._copied.synchronize()
        return self._values


class DeviceNumber:
    """A number of the device, as of the newest copy that has arrived at the host. Never waits."""

    def __init__(self) -> None:
        self._newest: float | None = None
        self._copy: AsyncHostCopy | None = None

    @property
    def is_under_way(self) -> bool:
        """True if the last copy has not been read."""
        return self._copy is not None

    def copy(self, value: Tensor) -> None:
        """Begins a copy of a 0-D tensor. One that has not arrived is forgotten."""
        self.read()
        self._copy = AsyncHostCopy(value)

    def read(self) -> float | None:
        """The newest value that has arrived."""
        if self._copy is not None and self._copy.arrived:
            self._newest, self._copy = float(self._copy.read()), None
        return self._newest
