"""Sees the operations of torch and of the worker while a training runs on the recorded device."""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, UntypedStorage
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy, native
from lightning_zenflow.between_steps import uses
from lightning_zenflow.between_steps.served_gradients import ServedGradient
from lightning_zenflow.core.device import RUNTIMES
from lightning_zenflow.deepspeed import environment
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload import build
from lightning_zenflow.worker.arena import WORD_BYTES, Arena
from lightning_zenflow.worker.process import JobMessage, Submission, SupervisedWorker
from recorded_device.clocks import HOST, WORKER, Clock, Span, join
from recorded_device.device import DeviceMemory, RecordedAccelerator, RecordedDevice, one_launch_a_pass, place
from recorded_device.tensors import DEVICE, Transfer, tell_apart

_VIEWS = {
    *(
        "view",
        "view_as",
        "_unsafe_view",
        "_reshape_alias",
        "as_strided",
        "alias",
        "detach",
        "set_",
        "lift_fresh",
        "is_pinned",
    ),
    *("expand", "permute", "slice", "select", "narrow", "t", "transpose", "unsqueeze", "squeeze", "unbind", "split"),
    *("unsafe_split", "split_with_sizes"),
}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_SHAPE_ONLY = {
    *("new_zeros", "zeros_like", "new_empty", "empty_like", "ones_like", "full_like", "new_full", "new_ones"),
}


_resize = UntypedStorage.resize_


class Watch(TorchDispatchMode):
    """Adds every operation of torch to the order."""

    def __init__(self, device: RecordedDevice) -> None:
        super().__init__()
        self._device, self._order = device, device.order
        self.word_clocks: dict[int, Clock] = {}
        """For each address that a device copied to last: what precedes the copy's end."""
        self._words = range(0)
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}  # with their memory; 0: none

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, ServedGradient) for t in types):
            return NotImplemented  # its own operations, in the place of this one, are seen
        kwargs = kwargs or {}
        packet = func.overloadpacket.__name__
        if func.namespace == "c10d" and packet != "barrier":
            self._refuse_of_host(packet, [t for t in tree_iter(args) if isinstance(t, Tensor)])
        out = func(*args, **kwargs)
        if packet in _VIEWS:
            return out
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_iter(value) if isinstance(t, Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            # The schemas of collectives do not say what is written.
            written |= func.namespace == "c10d" and not argument.name.startswith("input")
            (writes if written else reads).extend(tensors)
        new = [t for t in tree_iter(out) if isinstance(t, Tensor) and all(t is not w for w in writes)]
        # Not for another device that is named beside an argument of the device: autograd names it without index.
        if kwargs.get("device") == DEVICE or any(map(self.is_on_device, reads + writes)):
            for tensor in new:
                self._allocated(tensor)
        if packet in _SHAPE_ONLY:
            reads = []
        if packet in _ALLOCATIONS:
            return out
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        self._add(packet, reads, writes, new, non_blocking=non_blocking is True)
        return out

    def _refuse_of_host(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raises RuntimeError for a collective of the host's tensors, as a process group does that has NCCL alone."""
        if not all(map(self.is_on_device, tensors)):
            raise RuntimeError(f"No backend type associated with device type cpu: {name} in {place()}")

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of the recorded device; see `tensors`."""
        # Private: the address of the storage object, which storages without memory have too.
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._storages

    def _add(
        self, name: str, reads: list[Tensor], writes: list[Tensor], new: list[Tensor], *, non_blocking: bool
    ) -> None:
        tensors = [*reads, *writes, *new]
        actor = self._device.current_stream().name if any(map(self.is_on_device, tensors)) else HOST
        transfer = Transfer.of(name, reads, writes + new, is_on_device=self.is_on_device)
        if actor != HOST and transfer.mixes:
            self._order.races[f"{name} mixes memory of host and device in {place()}"] += 1
        read, written = [s for t in reads for s in self.spans(t)], [s for t in writes + new for s in self.spans(t)]
        where = f"{name} in {place() or 'the model'}"
        clock = self._order.begin(actor)
        self._order.touch(read, writes=False, actor=actor, clock=clock, name=where)
        self._order.touch(written, writes=True, actor=actor, clock=clock, name=where)
        kind = HOST if actor == HOST else transfer.kind
        if kind in (HOST, "launch") and self._device.is_within_pass:
            kind = "part"
        n_bytes = sum(t.nbytes for t in writes + new) if kind in ("d2h", "h2d") else 0
        self._device.note(kind, actor, name=name, n_bytes=n_bytes)
        if actor == HOST:
            for span in written:
                self._forget_numbers(span)
        if kind == "d2h":
            self._note_numbers(writes)
            for span in written:
                self.word_clocks[span.begin] = clock
        if actor != HOST and transfer.waits(non_blocking=non_blocking, is_page_locked=self._device.is_page_locked):
            self._device.host_waits(clock, name)

    def new_words(self, addresses: range) -> None:
        """Takes the addresses of a new arena's words. The worker waits for numbers there: none may come twice before it is cleared."""
        self._words = addresses
        self._numbers.clear()

    def _note_numbers(self, targets: Sequence[Tensor]) -> None:
        offset = native.StepWord.sequence.offset
        for word in targets:
            if word.data_ptr() in self._words and word.nbytes == WORD_BYTES:
                with torch._C._DisableTorchDispatch():
                    number = int(word.view(torch.int64)[offset // 8])
                address = word.data_ptr() + offset
                if self._numbers.get(address) == number:
                    self._order.races[f"the worker finds {number} before it is written again in {place()}"] += 1
                self._numbers[address] = number

    def _forget_numbers(self, written: Span) -> None:
        for address in [a for a in self._numbers if written.begin <= a < written.end]:
            del self._numbers[address]

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        weakref.finalize(storage, self._freed, storage._cdata)
        self._take(storage)

    def _take(self, storage: UntypedStorage) -> None:
        base = self._storages[storage._cdata] = storage.data_ptr()
        if base:
            self._order.allocate(base, self._device.current_stream().name)
            self._device.memory.allocate(base, storage.nbytes(), counts=not self._device.is_within_pass)

    def _freed(self, number: int) -> None:
        if base := self._storages.pop(number):
            self._order.free(base)
            self._device.memory.free(base)

    def resize(self, storage: UntypedStorage, n_bytes: int) -> None:
        """`UntypedStorage.resize_`, which is no operation of torch's."""
        is_on_device = storage._cdata in self._storages
        if is_on_device:
            self._freed(storage._cdata)
        _resize(storage, n_bytes)
        if is_on_device:
            self._take(storage)

    def spans(self, tensor: Tensor) -> list[Span]:
        """Parts of memory whose order matters: the device's, and of the host's what the device or the worker uses."""
        base = (
            tensor.untyped_storage().data_ptr()
            if self.is_on_device(tensor)
            else self._order.host_base(tensor.data_ptr())
        )
        if tensor.numel() == 0 or base is None:
            return []
        if tensor.dim() >= 2 and tensor.shape[0] <= 8 and not tensor.is_contiguous() and tensor.stride(0) > 0:
            with torch._C._DisableTorchDispatch():
                parts = list(tensor.unbind(0))
            return [span for part in parts for span in self.spans(part)]
        begin = tensor.data_ptr()
        length = 1 + sum((n - 1) * abs(d) for n, d in zip(tensor.shape, tensor.stride(), strict=True))
        return [Span(base, begin, begin + length * tensor.element_size())]


class WatchedWorker:
    """Adds the worker's jobs to the order: it reads what the device copied before the word it waits for, and answers behind its writes."""

    def __init__(self, device: RecordedDevice, watch: Watch) -> None:
        self._device, self._order, self._watch = device, device.order, watch
        self._arena: Arena | None = None
        self._blocks: Sequence[Any] = ()
        self._submitted: list[tuple[Submission, Clock]] = []

    def install(self, stack: ExitStack) -> None:
        """Sees arenas, submissions and answers until the stack ends."""
        init, enqueue, receive = Arena.__init__, SupervisedWorker.enqueue, SupervisedWorker._receive

        def new_arena(arena: Arena, partition: Any, *args: Any, **kwargs: Any) -> None:
            init(arena, partition, *args, **kwargs)
            self._arena, self._blocks = arena, partition.blocks
            self._submitted.clear()
            last = arena.exp_avg_sq.array
            states_end = last.data_ptr() + last.nbytes
            begin = arena._address()
            self._order.add_host_memory(begin, arena.master.data_ptr())
            self._watch.new_words(range(begin, arena.master.data_ptr()))
            self._order.add_host_memory(arena.master.data_ptr(), states_end)
            for part in (*arena.slots, arena.publish):
                self._order.add_host_memory(part.data_ptr(), part.data_ptr() + part.nbytes)

        def submitted(worker: SupervisedWorker, message: JobMessage | native.Touch) -> Submission:
            submission = enqueue(worker, message)
            self._submitted.append((submission, dict(self._order.clocks[HOST])))
            return submission

        def received(worker: SupervisedWorker) -> None:
            receive(worker)
            # The worker answers in an order of its own.
            for submission, clock in [*self._submitted]:
                if submission.is_answered:
                    self._submitted.remove((submission, clock))
                    self._process(submission.message, clock)

        stack.enter_context(patch.object(Arena, "__init__", new_arena))
        stack.enter_context(patch.object(SupervisedWorker, "enqueue", submitted))
        # Private: there the trainer learns of an answer, whichever method it called.
        stack.enter_context(patch.object(SupervisedWorker, "_receive", received))

    def _process(self, message: JobMessage | native.Touch, at_submission: Clock) -> None:
        arena = self._arena
        assert arena is not None
        is_job = isinstance(message, JobMessage)
        words, accesses = (self._words(arena, message), self._accesses(arena, message)) if is_job else ([], [])
        known = [self._watch.word_clocks[word.data_ptr()] for word in words]
        self._order.clocks[WORKER] = join(self._order.clocks[WORKER], at_submission, *known)
        clock = self._order.begin(WORKER)
        for part, writes, name in accesses:
            self._order.touch(self._watch.spans(part), writes=writes, actor=WORKER, clock=clock, name=f"replay {name}")
        self._order.follow(HOST, clock)

    def _words(self, arena: Arena, job: JobMessage) -> list[Tensor]:
        """The words that the worker waits for."""
        behind_block_word = job.tentative in (Tentative.PREDICTED, Tentative.TRUE_IF_KNOWN)
        last = job.first_step + len(job.slots) - behind_block_word - 1
        words = [arena.block_words[job.block]] if behind_block_word else []
        # Before the first step there is none.
        return [*words, arena.word_of(last)] if job.slots and last >= 1 else words

    def _accesses(self, arena: Arena, job: JobMessage) -> list[tuple[Tensor, bool, str]]:
        """What a job reads, or writes."""
        block, states = self._blocks[job.block], (arena.master, arena.exp_avg.array, arena.exp_avg_sq.array)
        numel = block.end - block.begin
        return [
            *((arena.slots[slot].narrow(0, 0, numel), False, "of a slot") for slot in job.slots),
            (arena.publish[job.publish_buffer].narrow(0, 0, numel), True, "to a publish buffer"),
            *((state.narrow(0, block.begin, numel), True, "of the state") for state in states),
        ]


@contextmanager
def recorded_device(*, events_are_reached: bool = False, memory_limit: float = math.inf) -> Iterator[RecordedDevice]:
    """Trains on the recorded device in the context, with at most so many bytes on it; strategies in it are made for a CPU."""
    device = RecordedDevice(events_are_reached=events_are_reached, memory=DeviceMemory(limit=memory_limit))
    watch = Watch(device)
    with ExitStack() as stack:
        stack.callback(set_accelerator, get_accelerator())
        set_accelerator(RecordedAccelerator(device))
        stack.enter_context(patch.dict(RUNTIMES, cpu=lambda _: device))
        stack.enter_context(patch.object(build, "kernels_for", lambda _: one_launch_a_pass(device)))
        stack.enter_context(patch.object(environment, "CPU", DEVICE))
        # Private: where Lightning, with several ranks, makes the host wait for the device before each batch, which would order everything.
        stack.enter_context(patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda _: None))
        # In first steps the host waits for the device to look for the user's writes, which would order everything.
        stack.enter_context(patch.object(uses, "FOLLOWED", 0))
        # Private: where torch puts the objects of a collective; with NCCL alone on the rank's GPU.
        stack.enter_context(patch.object(distributed_c10d, "_get_object_coll_device", lambda _=None: str(DEVICE)))
        stack.enter_context(
            patch.object(Tensor, "record_stream", lambda tensor, stream: device.keep_for(stream, tensor))
        )
        stack.enter_context(patch.object(UntypedStorage, "resize_", lambda storage, n: watch.resize(storage, n)))

        work_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            # gloo copies some results from memory of its own there, where NCCL would order the current stream.
            with torch._C._DisableTorchDispatch():
                return work_wait(work, *args, **kwargs)

        stack.enter_context(patch.object(dist.Work, "wait", wait))

        def batch_to_device(_: Any, batch: Any, *__: Any, **___: Any) -> Any:
            return apply_to_collection(batch, Tensor, device.from_page_locked)

        # As with `pin_memory=True` in the loader; otherwise the host waits for the whole device in every step.
        stack.enter_context(patch.object(ZenFlowStrategy, "batch_to_device", batch_to_device))
        tell_apart(watch.is_on_device, stack)
        WatchedWorker(device, watch).install(stack)
        stack.enter_context(watch)
        yield device
