"""Sees the operations of torch and of the worker while a training runs on the recorded device."""

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

import lightning_zenflow
from benchmarks.recorded_device.clocks import HOST, WORKER, Clock, Span, join
from benchmarks.recorded_device.device import RecordedAccelerator, RecordedDevice, RecordedRuntime
from benchmarks.recorded_device.passes import one_launch_a_pass
from lightning_zenflow.core.device import RUNTIMES
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.process import JobMessage
from lightning_zenflow.worker.supervisor import SupervisedWorker
from lightning_zenflow.zero import build

_PACKAGE = str(Path(lightning_zenflow.__file__).parent)
_DEEPSPEED = "stage_1_and_2.py"

_VIEWS = frozenset(
    [
        "view",
        "detach",
        "alias",
        "slice",
        "select",
        "t",
        "transpose",
        "expand",
        "as_strided",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "permute",
        "unbind",
        "_reshape_alias",
        "is_pinned",
        "unsafe_split",
        "narrow",
        "set_",
        "lift_fresh",
    ]
)
_ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
_SHAPE_ONLY = frozenset(
    ["new_zeros", "zeros_like", "new_empty", "empty_like", "ones_like", "full_like", "new_full", "new_ones"]
)


def place() -> str:
    """The innermost function of the package, or of DeepSpeed's optimizer, that is running; empty: neither is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) or name.endswith(_DEEPSPEED):
            return f"{Path(name).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class Watch(TorchDispatchMode):
    """Adds every operation of torch to the order."""

    def __init__(self, device: RecordedDevice) -> None:
        super().__init__()
        self._device, self._order = device, device.order
        self.word_clocks: dict[int, Clock] = {}
        """For each address that a device copied to last: what precedes the copy's end."""
        self.word_copies: dict[int, int] = {}
        """For each such address: the index of that copy among the operations."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket.__name__
        if packet in _VIEWS:
            return out
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_iter(value) if isinstance(t, Tensor)]
            written = (argument.alias_info is not None and argument.alias_info.is_write) or func.namespace == "c10d"
            (writes if written else reads).extend(tensors)
        new = [t for t in tree_iter(out) if isinstance(t, Tensor) and all(t is not w for w in writes)]
        if packet in _SHAPE_ONLY:
            reads = []
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))
        self._add(packet, reads, writes, new, blocks=non_blocking is not True, flops=flops)
        return out

    def _add(
        self, name: str, reads: list[Tensor], writes: list[Tensor], new: list[Tensor], *, blocks: bool, flops: int
    ) -> None:
        read, written = [s for t in reads for s in self._spans(t)], [s for t in writes for s in self._spans(t)]
        on_host = [self._order.host_base(span.begin) is not None for span in read + written]
        actor = HOST if on_host and all(on_host) else self._device.current.name
        for tensor in new:
            self._allocated(tensor, actor)
        if name in _ALLOCATIONS:
            return
        copies = "copy" in name
        if (
            any(on_host)
            and not all(on_host)
            and not copies
            and any(t.dim() for t in reads + writes if self._is_host(t))
        ):
            self._order.races[f"{name} mixes memory of host and device in {place()}"] += 1
        where = f"{name} in {place() or 'the model'}"
        clock = self._order.begin(actor)
        self._order.touch(read, writes=False, actor=actor, clock=clock, name=where)
        self._order.touch(written, writes=True, actor=actor, clock=clock, name=where)
        self._order.touch((s for t in new for s in self._spans(t)), writes=True, actor=actor, clock=clock, name=where)
        down = copies and written and self._order.host_base(written[0].begin) is not None
        up = copies and read and self._order.host_base(read[0].begin) is not None
        kind = HOST if actor == HOST else "d2h" if down else "h2d" if up else "launch"
        if kind == "launch" and self._device.written is not None:
            kind = "part"
            self._device.written.update(span.begin for span in written)
        if kind in ("d2h", "h2d"):
            for copied in writes:
                self._device.note(kind, actor, name=name, n_bytes=copied.nbytes, numel=copied.numel())
        else:
            tensors = [*reads, *writes, *new]
            n_bytes, numel = sum(t.nbytes for t in tensors), max((t.numel() for t in tensors), default=0)
            self._device.note(kind, actor, name=name, n_bytes=n_bytes, numel=numel, flops=flops)
        if down and actor != HOST:
            for span in written:
                self.word_clocks[span.begin] = clock
                self.word_copies[span.begin] = len(self._order.operations) - 1
        if actor != HOST and (name == "_local_scalar_dense" or (name == "copy_" and (down or up) and blocks)):
            self._device.host_waits(clock, name)

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and self._order.host_base(tensor.data_ptr()) is not None

    def _allocated(self, tensor: Tensor, actor: str) -> None:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if base and actor != HOST and self._order.allocate(base, actor):
            weakref.finalize(storage, self._order.free, base)
            self._device.memory.allocate(base, storage.nbytes(), place(), counts=self._device.written is None)
            weakref.finalize(storage, self._device.memory.free, base)

    def _spans(self, tensor: Tensor) -> list[Span]:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return []
        if tensor.dim() >= 2 and tensor.shape[0] <= 8 and not tensor.is_contiguous() and tensor.stride(0) > 0:
            with torch._C._DisableTorchDispatch():
                parts = list(tensor.unbind(0))
            return [span for part in parts for span in self._spans(part)]
        begin = tensor.data_ptr()
        length = 1 + sum((n - 1) * abs(d) for n, d in zip(tensor.shape, tensor.stride(), strict=True))
        base = self._order.host_base(begin)
        if base is None:
            base = tensor.untyped_storage().data_ptr()
        return [Span(base, begin, begin + length * tensor.element_size())]


class WatchedWorker:
    """Adds the worker's jobs to the order: it reads what the device copied before the word it waits for, and answers behind its writes."""

    def __init__(self, device: RecordedDevice, watch: Watch) -> None:
        self._device, self._order, self._watch = device, device.order, watch
        self._arena: Arena | None = None
        self._blocks: Sequence[Any] = ()
        self._submitted: deque[tuple[JobMessage, Clock]] = deque()

    def install(self, stack: ExitStack) -> None:
        """Sees arenas, submissions and answers until the stack ends."""
        init, submit, wait = Arena.__init__, SupervisedWorker.submit, SupervisedWorker.wait

        def new_arena(arena: Arena, partition: Any, *args: Any, **kwargs: Any) -> None:
            init(arena, partition, *args, **kwargs)
            self._arena, self._blocks = arena, partition.blocks
            self._submitted.clear()
            states_end = arena.exp_avg_sq.data_ptr() + arena.exp_avg_sq.nbytes
            begin = arena._address()
            self._order.add_host_memory(begin, arena.master.data_ptr())
            self._order.add_host_memory(arena.master.data_ptr(), states_end)
            for row in (*arena.slots, *arena.publish):
                self._order.add_host_memory(row.data_ptr(), row.data_ptr() + row.nbytes)

        def submitted(worker: SupervisedWorker, message: JobMessage) -> None:
            self._submitted.append((message, dict(self._order.clocks[HOST])))
            words = self._words(message)
            after = -1 if words is None else self._watch.word_copies[words.data_ptr()]
            self._device.note("submit", HOST, event=message.job_id, after=after)
            submit(worker, message)

        def answered(worker: SupervisedWorker) -> Any:
            completion = wait(worker)
            self._replay(*self._submitted.popleft())
            return completion

        stack.enter_context(patch.object(Arena, "__init__", new_arena))
        stack.enter_context(patch.object(SupervisedWorker, "submit", submitted))
        stack.enter_context(patch.object(SupervisedWorker, "wait", answered))

    def _words(self, job: JobMessage) -> Tensor | None:
        """The word that the worker waits for."""
        assert self._arena is not None
        if not job.slots:
            return None
        if job.in_backward:
            return self._arena.block_sequence[job.block]
        return self._arena.sequence[(job.first_step + len(job.slots) - 1) % self._arena.n_step_records]

    def _replay(self, job: JobMessage, at_submission: Clock) -> None:
        arena, block = self._arena, self._blocks[job.block]
        assert arena is not None
        numel = block.end - block.begin
        clocks = [self._order.clocks[WORKER], at_submission]
        words = self._words(job)
        if words is not None:
            clocks.append(self._watch.word_clocks[words.data_ptr()])
        self._order.clocks[WORKER] = join(*clocks)
        clock = self._order.begin(WORKER)

        def touch(tensor: Tensor, *, writes: bool, name: str) -> None:
            spans = self._watch._spans(tensor)
            self._order.touch(spans, writes=writes, actor=WORKER, clock=clock, name=name)

        for slot in job.slots:
            touch(arena.slots[slot].narrow(0, 0, numel), writes=False, name="replay of a slot")
        touch(arena.publish[job.publish_buffer].narrow(0, 0, numel), writes=True, name="replay to a publish buffer")
        touch(arena.states.narrow(1, block.begin, numel), writes=True, name="replay of the states")
        self._device.note("replay", WORKER, event=job.job_id, n_bytes=numel * (24 + 2 * len(job.slots) + 2))
        self._order.follow(HOST, clock)


@contextmanager
def recorded_device(*, events_are_reached: bool = False) -> Iterator[RecordedDevice]:
    """Trains on the recorded device in the context; strategies in it are made for a CPU."""
    device = RecordedDevice(events_are_reached=events_are_reached)
    watch = Watch(device)
    with ExitStack() as stack:
        stack.callback(set_accelerator, get_accelerator())
        set_accelerator(RecordedAccelerator(device))
        stack.enter_context(patch.dict(RUNTIMES, cpu=lambda torch_device: RecordedRuntime(torch_device, device)))
        stack.enter_context(patch.object(build, "kernels_for", lambda _: one_launch_a_pass(device)))

        def record_stream(tensor: Tensor, stream: Any) -> None:
            device.order.keep_for(tensor.untyped_storage().data_ptr(), stream.name)

        stack.enter_context(patch.object(Tensor, "record_stream", record_stream))
        WatchedWorker(device, watch).install(stack)
        stack.enter_context(watch)
        yield device
