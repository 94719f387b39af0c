"""Streams and events of the recorded device, for the package (`RecordedDevice`) and for DeepSpeed (`RecordedAccelerator`); its memory, with
a limit on all allocations; its kernels.
"""

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

import lightning_zenflow
from callbacks import At
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.deepspeed.environment import CpuAccelerator
from lightning_zenflow.kernels.base import Kernels
from recorded_device.clocks import HOST, MAIN, Clock, Operation, Order
from recorded_device.tensors import DEVICE

_PACKAGE = str(Path(lightning_zenflow.__file__).parent)
_DEEPSPEED = ("stage_1_and_2.py", "stage3.py")
_OTHERS = (
    "strategy.",
    "steps.complete",
    "training.run_forward",
    "construction.",
    "trained_engine.",
    "engine.",
    "stage_1_and_2.",
    "stage3.",
)
"""Places whose allocations are the model's and DeepSpeed's."""


def place() -> str:
    """The innermost function of the package, or of DeepSpeed's optimizer, that is running; empty: neither is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) or name.endswith(_DEEPSPEED):
            return f"{Path(name).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@dataclass
class DeviceMemory:
    """Log of live allocations. Memory that only exists within a pass is not counted as the package's: on a GPU a pass works in place."""

    limit: float = math.inf
    """Bytes of all live allocations, whoever made them, beyond which the next one fails as on a full GPU."""
    total: int = 0
    """Bytes of all live allocations."""
    most: int = 0
    """Most of these since the package forgot the peak."""
    live: int = 0
    """Bytes of the package's."""
    peak: int = 0
    """Most of these since the last `restart`."""
    _sizes: dict[int, tuple[int, bool]] = field(default_factory=dict)  # bytes, whether they are the package's

    def allocate(self, base: int, n_bytes: int, *, counts: bool) -> None:
        """Notes an allocation at `base`; `counts` is false within a pass.

        Raises:
            torch.OutOfMemoryError: it exceeds the limit.
        """
        where = place()
        is_own = bool(where) and not where.startswith(_OTHERS)
        self._sizes[base] = n_bytes, is_own
        self.total += n_bytes
        self.most = max(self.most, self.total)
        self.live += is_own * n_bytes
        if counts:
            self.measure()
        if self.total > self.limit:
            raise torch.OutOfMemoryError(
                f"{self.total} of {self.limit:g} bytes of the recorded device, {n_bytes} in {where}"
            )

    def free(self, base: int) -> None:
        """Notes the end of an allocation."""
        n_bytes, is_own = self._sizes.pop(base)
        self.total -= n_bytes
        self.live -= is_own * n_bytes

    def measure(self) -> None:
        """Compares with the peak."""
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Begins a new peak."""
        self.peak = self.live


class RecordedDevice(HostRuntime):
    """Owner of the order, of the streams and of the stack of current streams."""

    runs_behind = True

    def __init__(self, *, events_are_reached: bool, memory: DeviceMemory) -> None:
        super().__init__(DEVICE)
        self.order = Order()
        self.events_are_reached = events_are_reached
        """What `Event.query` answers: both must be right."""
        self.main = RecordedStream(self, MAIN)
        self.memory = memory
        self.is_within_pass = False
        """Whether a pass of `kernels` is running (`one_launch_a_pass`)."""
        self.page_locked: dict[int, int] = {}
        """Ranges of host memory: begin and end."""
        self._stack = [self.main]
        self._numbers = itertools.count(1)

    @override
    def current_stream(self) -> "RecordedStream":
        return self._stack[-1]

    @override
    def new_stream(self) -> "RecordedStream":
        return RecordedStream(self, f"stream {self.new_number()}")

    def new_number(self) -> int:
        return next(self._numbers)

    @override
    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def one_launch(self, name: str) -> Iterator[None]:
        """Notes all work of the context, if there is any, as one launch."""
        before = len(self.order.operations)
        self.is_within_pass = True
        try:
            yield
        finally:
            self.is_within_pass = False
        if len(self.order.operations) > before:
            self.note("launch", self.current_stream().name, name=name)
        self.memory.measure()

    def host_waits(self, clock: Clock, name: str, event: int = 0) -> None:
        self.order.follow(HOST, clock)
        self.note("host wait", HOST, name=name, event=event)

    @override
    def record_event(self, *, timing: bool = False) -> "RecordedEvent":
        return self.current_stream().record_event()

    @override
    def synchronize(self) -> None:
        for actor in [a for a in self.order.clocks if a.startswith("stream") or a == MAIN]:
            self.host_waits(self.order.clocks[actor], "synchronize")

    def note(self, kind: str, actor: str, **values: Any) -> None:
        self.order.operations.append(Operation(kind=kind, actor=actor, place=place(), **values))

    def step_ends(self) -> At:
        """Marks the ends of steps among the operations."""
        return At("on_train_batch_end", lambda trainer: self.note("step", HOST, event=trainer.global_step))

    def waits(self) -> list[str]:
        """Where the host waits between the fourth step and the last."""
        operations = self.order.operations
        ends = [i for i, o in enumerate(operations) if o.kind == "step"]
        return [o.place for o in operations[ends[3] : ends[-1]] if o.kind == "host wait"]

    @override
    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        self.order.keep_for(tensor.untyped_storage().data_ptr(), stream.name)

    @override
    def page_lock(self, address: int, n_bytes: int) -> None:
        self.page_locked[address] = address + n_bytes

    @override
    def page_unlock(self, address: int) -> None:
        del self.page_locked[address]

    @override
    def forget_peak(self) -> None:
        self.memory.most = self.memory.total

    @override
    def allocated(self) -> tuple[int, int]:
        return self.memory.total, self.memory.most

    @override
    def capacity(self, *, reserve: float = 1.0) -> float:
        return self.memory.limit * (1 - 0.05 * reserve)

    @override
    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of its own, known as such until it is freed."""
        memory = torch.empty(shape, dtype=dtype)
        if memory.numel():
            begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
            self.order.add_host_memory(begin, end)
            self.page_lock(begin, memory.nbytes)
            weakref.finalize(memory.untyped_storage(), self.order.remove_host_memory, begin, end)
            weakref.finalize(memory.untyped_storage(), self.page_unlock, begin)
        return memory

    def from_page_locked(self, values: Tensor) -> Tensor:
        """Copies values of the host to the device, without a wait."""
        return self.empty_on_host(values.shape, values.dtype).copy_(values).to(DEVICE, non_blocking=True)

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor lies within one page-locked range."""
        begin = tensor.data_ptr()
        return any(b <= begin and begin + tensor.nbytes <= e for b, e in self.page_locked.items())


class RecordedStream:
    """A stream with the interface of `torch.cuda.Stream`."""

    def __init__(self, device: RecordedDevice, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, stream: "RecordedStream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: "RecordedEvent") -> None:
        self._device.order.follow(self.name, event.clock)

    def record_event(self, event: "RecordedEvent | None" = None) -> "RecordedEvent":
        event = event or RecordedEvent(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class RecordedEvent:
    """An event with the interface of `torch.cuda.Event`."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self.clock: Clock = {}
        self.number = 0

    def record(self, stream: RecordedStream | None = None) -> None:
        name = (stream or self._device.current_stream()).name
        order = self._device.order
        self.clock = {**order.clocks[HOST], **order.clocks[name]}
        self.number = self._device.new_number()
        self._device.note("record", name, event=self.number)

    def wait(self, stream: RecordedStream | None = None) -> None:
        (stream or self._device.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._device.host_waits(self.clock, "synchronize", self.number)

    def query(self) -> bool:
        if self._device.events_are_reached:
            self._device.order.follow(HOST, self.clock)
        return self._device.events_are_reached

    def elapsed_time(self, end_event: "RecordedEvent") -> float:
        return 0.0


class RecordedAccelerator(CpuAccelerator):
    """The recorded device for DeepSpeed, whose own branches for CUDA run: two buckets, events of readiness and reuse, `record_stream`."""

    def __init__(self, recorded: RecordedDevice) -> None:
        super().__init__()
        self._recorded = recorded

    @override
    def device_name(self, device_index: int | None = None) -> str:
        # Of every rank: each has a recorded device of its own.
        return str(DEVICE)

    current_device_name = device_name

    @override
    def is_synchronized_device(self) -> bool:
        return False

    @property
    @override
    def Stream(self) -> Any:
        return lambda *args, **kwargs: self._recorded.new_stream()

    @property
    @override
    def Event(self) -> Any:
        return lambda *args, **kwargs: RecordedEvent(self._recorded)

    @override
    def stream(self, stream: RecordedStream) -> AbstractContextManager[None]:
        return self._recorded.on(stream)

    @override
    def current_stream(self, device_index: int | None = None) -> RecordedStream:
        return self._recorded.current_stream()

    @override
    def default_stream(self, device_index: int | None = None) -> RecordedStream:
        return self._recorded.main

    @override
    def synchronize(self, device_index: int | None = None) -> None:
        self._recorded.synchronize()


_OF_PASSES = ("route", "column_writer")
"""Methods that call passes and copy."""


def one_launch_a_pass(device: RecordedDevice) -> Kernels:
    """The kernels of a recorded device, by torch's operations, each pass noted as the one launch that it is on a GPU.

    The operations within a pass still count for the order, as parts.
    """

    def whole(name: str) -> Callable[..., Any]:
        run = getattr(Kernels, name)

        def noted(self: Kernels, *args: Any, **kwargs: Any) -> Any:
            if device.is_within_pass:
                return run(self, *args, **kwargs)
            with device.one_launch(name):
                return run(self, *args, **kwargs)

        return noted

    passes = [
        name
        for name, value in vars(Kernels).items()
        if callable(value) and name not in _OF_PASSES and not name.startswith("_")
    ]
    made: type[Kernels] = type("OneLaunchKernels", (Kernels,), {name: whole(name) for name in passes})
    return made()
