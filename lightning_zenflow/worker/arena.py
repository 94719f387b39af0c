"""Shared memory of the trainer and its worker: one memfd per rank, as tensors. ``csrc/common/protocol.h`` specifies the layout.

A memfd has no name that could be left behind, does not count towards /dev/shm, and is freed with its last file descriptor and mapping.
"""

import contextlib
import ctypes
import fcntl
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_zenflow import native
from lightning_zenflow.core.device import PAGE_BYTES, runtime_of, warn_of_pageable_memory
from lightning_zenflow.core.partition import Partition, round_up
from lightning_zenflow.core.process import MEMORY_PREFIX, exclude_from_children, new_pages
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.worker.machine import running_on
from lightning_zenflow.worker.moments import CodedMoment, CodedMoments, Moment, first_scales

_log = logging.getLogger(__name__)

WORD_BYTES = ctypes.sizeof(native.StepWord)


@dataclass(frozen=True, kw_only=True)
class ArenaSizes:
    """What of the arena's layout does not follow from the partition."""

    n_step_records: int
    n_slots: int
    n_publish_buffers: int
    dtype: torch.dtype
    """Element type of gradients and published weights: the model's."""
    moments_dtype: torch.dtype = torch.float32
    """float32, bfloat16 or int8."""
    n_threads: int = 1
    """Of the worker; each has a journal entry."""
    newest_first: bool = False
    """Whether the worker takes the newest job whose gradients have arrived, instead of the oldest."""


class Arena:
    """Owner of the shared memory. All tensors are views that keep it mapped. Where `device` runs behind the host, reserved memory that it
    copies from or to is page-locked, on the NUMA nodes of the worker's `cores`; without any, on the caller's node.

    Attributes:
        fd: the memfd, for the worker to inherit; owned by the arena.
        master: [partition.numel] float32, the exact weights; beside it the moments, `exp_avg` and `exp_avg_sq`.
        states: these three, in that order.
        rounds: whether the worker rounds moments at the end of each job.
        slots: [n_slots, slot_numel]; each holds one block's gradient of one step.
        publish: [n_publish_buffers, slot_numel]; each holds one block's new weights.
        step_words: [n_step_records, 4] int32, a ring of words as of `core.step_inputs.step_word`: by them the device tells the worker that
            the gradients of a step have arrived.
        block_words: [n_blocks, 4] int32, the same of the blocks' last jobs in backward.
    """

    def __init__(
        self, partition: Partition, sizes: ArenaSizes, *, device: torch.device, cores: Sequence[int] = ()
    ) -> None:
        header, sections = _layout(partition, sizes)
        self.fd = os.memfd_create(MEMORY_PREFIX + "arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, header.total_bytes)
        # Who inherits it can neither take more memory nor cut off what others have mapped. Memory is still freed, by holes in the file.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self.fd, header.total_bytes)
        # Forked dataloader workers must neither keep nor copy the optimizer states.
        exclude_from_children(self._memory)
        # A dump of a failed process would have all states in it.
        self._memory.madvise(mmap.MADV_DONTDUMP)
        ctypes.memmove(self._address(), ctypes.addressof(header), ctypes.sizeof(header))
        self._header = native.ArenaHeader.from_buffer(self._memory)

        self._partition = partition
        self.write_trained(dict.fromkeys(range(len(partition.slices)), 0))
        blocks = (native.Block * header.n_blocks).from_buffer(self._memory, header.blocks_offset)
        blocks[:] = [native.Block(begin=block.begin, end=block.end) for block in partition.blocks]

        def array(name: str) -> Tensor:
            offset, dtype, shape = sections[name]
            if math.prod(shape) == 0:
                return torch.empty(shape, dtype=dtype, device="cpu")
            return torch.frombuffer(self._memory, dtype=dtype, offset=offset, count=math.prod(shape)).view(shape)

        self.master = array("master")
        self.rounds = sizes.moments_dtype != torch.float32
        self.exp_avg, self.exp_avg_sq = Moment(array("exp_avg")), Moment(array("exp_avg_sq"))
        if sizes.moments_dtype == torch.int8:
            both = CodedMoments(self.exp_avg.array, self.exp_avg_sq.array, array("scales"), partition.tiles)
            self.exp_avg, self.exp_avg_sq = (CodedMoment(both, is_first=is_first) for is_first in (True, False))
        self.states: tuple[Moment, Moment, Moment] = Moment(self.master), self.exp_avg, self.exp_avg_sq
        self.slots, self.publish = map(array, ("slots", "publish"))
        records = array("step_records")
        self.step_words = records[:, native.StepRecord.word.offset :][:, :WORD_BYTES].view(torch.int32)
        self.block_words = array("block_words").view(torch.int32)
        self._counts = records.view(torch.int64)[:, native.StepRecord.count.offset // 8]
        self._runtime, self._cores = runtime_of(device), cores
        self._page_locked: list[int] = []
        self._copies: list[Tensor] = []  # must not be freed before they are unlocked
        self._reserved: list[tuple[int, int]] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the shared memory that may be in use. The rest takes no memory."""
        return sum(end - begin for begin, end in self._reserved)

    def reserve(
        self, *, n_slots: int, n_publish_buffers: int, touch: Callable[[int, int, int], None] | None = None
    ) -> None:
        """Reserves all but the slots behind the first `n_slots` and the publish buffers behind the first `n_publish_buffers`, for good.
        Page-locking allocates memory on one thread. So the worker, which touches the states at its start, must start before, and `touch`,
        that of `SupervisedWorker`, allocates all else first.
        """
        header, row_bytes = self._header, self.slots.element_size() * self.slots.shape[1]
        for begin, end in (
            (0, header.master_offset),
            (header.master_offset, header.slots_offset),
            (header.slots_offset, header.slots_offset + n_slots * row_bytes),
            (header.publish_offset, header.publish_offset + n_publish_buffers * row_bytes),
        ):
            for reserved_begin, reserved_end in self._reserved:
                if reserved_begin <= begin < reserved_end:
                    begin = reserved_end
            # Whole memory pages.
            end = round_up(end, PAGE_BYTES)
            if begin >= end:
                continue
            self._reserved.append((begin, end))
            if self._runtime.runs_behind and begin != header.master_offset:
                if touch is not None:
                    # Slots and publish buffers of a section are rows; every block is divided among all threads.
                    n_rows = max(1, (end - begin) // row_bytes) if row_bytes else 1
                    touch(begin, n_rows, (end - begin) // n_rows)
                with running_on(self._cores):
                    self._page_lock(self._address() + begin, end - begin)

    def page_locked_copy(self, values: Tensor) -> Tensor:
        """A copy in page-locked memory, until `close`, which children do not inherit; on a CPU `values`."""
        if not self._runtime.runs_behind or values.numel() == 0:
            return values
        with running_on(self._cores):
            copy = new_pages(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
            # Whole memory pages, which no other range shares; torch's allocator would round to powers of two.
            self._page_lock(copy.data_ptr(), round_up(values.nbytes, mmap.PAGESIZE))
        self._copies.append(copy)
        return copy

    def _page_lock(self, address: int, n_bytes: int) -> None:
        try:
            self._runtime.page_lock(address, n_bytes)
        except RuntimeError as refusal:
            warn_of_pageable_memory(str(refusal))
        else:
            self._page_locked.append(address)

    @property
    def n_looks(self) -> int:
        """Looks of the workers at words that had not arrived."""
        return int(self._header.n_looks)

    def worker_state(self) -> str:
        """What the worker does, by its own account, for an error message."""
        h = self._header
        word = "" if h.awaited_block == native.NO_BLOCK else f" and block {h.awaited_block}"
        waits = f"waits for the word of step {h.awaited_step}{word}" if h.awaited_step else "waits for no word"
        return f"job {h.begun_job} begun, job {h.completed_job} completed, step {h.resolved_step} resolved; {waits}"

    def word_of(self, step: int) -> Tensor:
        """The one of `step_words` that a step has: [4] int32."""
        return self.step_words[step % len(self.step_words)]

    def continue_from(self, step: int, count: int) -> None:
        """Sets the last step whose factor the worker has read, with the number of applied steps up to it; while no job, and no copy of a
        word, is under way.
        """
        assert step >= 0 and count >= 0, (step, count)
        # Stale words of an earlier run must not match steps of this one. The checks too: a stale one would make a part of a repeated step's
        # word a whole one.
        self.step_words.zero_()
        self.block_words.zero_()
        self._counts[step % len(self.step_words)] = count
        self._header.resolved_step = step

    def write_hyperparameters(self, step: int, groups: list[GroupHyperparameters], *, tentative: bool = False) -> None:
        """Writes a step's hyperparameters for each parameter group: of the committed update, or of the `tentative` one in backward."""
        header = self._header
        assert step >= 1 and len(groups) == header.n_param_groups, (step, groups)
        begin = header.step_records_offset + (step % len(self.step_words)) * header.step_record_bytes
        begin += ctypes.sizeof(native.StepRecord)
        begin += tentative * len(groups) * ctypes.sizeof(native.Hyperparameters)
        entries = (native.Hyperparameters * len(groups)).from_buffer(self._memory, begin)
        entries[:] = [native.Hyperparameters(**vars(group)) for group in groups]

    def write_trained(self, slices: Mapping[int, int]) -> None:
        """Sets the slices that workers update which start later, each with the applied steps that it has missed."""
        tiles, groups = self._partition.tiles, [s.param_group for s in self._partition.slices]
        ranges = [
            native.Range(
                begin=tile.begin,
                end=tile.end,
                param_group=groups[tile.slice],
                first_scale=scale,
                n_missed=slices[tile.slice],
            )
            for tile, scale in zip(tiles, first_scales(tiles)[:-1], strict=True)
            if tile.slice in slices
        ]
        self._header.n_ranges = len(ranges)
        table = (native.Range * len(ranges)).from_buffer(self._memory, self._header.ranges_offset)
        table[:] = ranges

    def close(self, *, keep_state: bool, take_weights: Callable[[], None] | None = None) -> None:
        """Unlocks the memory, closes the file and frees all memory but that of master weights and moments if `keep_state`, when the worker
        has ended. Idempotent. Tensors remain readable, since the mapping lives as long as the last of them; freed memory reads as zeros.

        `take_weights` copies weights in the publish buffers to memory of their own; it is called once, when that of the slots is free.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # After an error, copies may still be in flight.
            unlocks: list[Callable[[], None]] = [partial(self._runtime.page_unlock, a) for a in self._page_locked]
            for release in [self._runtime.synchronize, *unlocks]:
                try:
                    release()
                except RuntimeError as fault:
                    # After a fault of the device every call reports it. The error that ends training stays the one that is raised.
                    _log.warning("at the end of training the device reports: %s", fault)
            self._copies.clear()
            if take_weights is not None:
                self._free(self._header.slots_offset, self._header.publish_offset // mmap.PAGESIZE * mmap.PAGESIZE)
                take_weights()
        self._free(self._header.slots_offset if keep_state else 0, len(self._memory))

    def _free(self, begin: int, end: int) -> None:
        """Frees the memory pages that begin in [begin, end); a rank with only padding has no slots."""
        begin = round_up(begin, mmap.PAGESIZE)
        if begin < end:
            # Fails if all memory of the process is locked (`mlockall`); it is then freed with the mapping.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def arena_bytes(partition: Partition, sizes: ArenaSizes) -> int:
    """Size of the arena."""
    return int(_layout(partition, sizes)[0].total_bytes)


def _layout(
    partition: Partition, sizes: ArenaSizes
) -> tuple[native.ArenaHeader, dict[str, tuple[int, torch.dtype, tuple[int, ...]]]]:
    """The header, and the offset, element type and shape of each section behind it; of structures, the bytes."""
    dtype, moments = sizes.dtype, sizes.moments_dtype
    n_blocks, numel = len(partition.blocks), partition.numel
    # Whole memory pages, so that a slot is never split between reservations: the device copies only within one.
    longest = max((block.end - block.begin for block in partition.blocks), default=0)
    slot_numel = round_up(longest, PAGE_BYTES // dtype.itemsize)
    n_param_groups = len(partition.group_begins)
    hyperparameter_bytes = 2 * n_param_groups * ctypes.sizeof(native.Hyperparameters)
    record_bytes = round_up(ctypes.sizeof(native.StepRecord) + hyperparameter_bytes)
    header = native.ArenaHeader(
        magic=native.MAGIC,
        version=native.VERSION,
        model_dtype=native.DATA_TYPES[dtype],
        moments_dtype=native.DATA_TYPES[moments],
        numel=numel,
        n_scales=first_scales(partition.tiles)[-1] if moments == torch.int8 else 0,
        n_blocks=n_blocks,
        n_param_groups=n_param_groups,
        n_step_records=sizes.n_step_records,
        step_record_bytes=record_bytes,
        n_slots=sizes.n_slots,
        n_publish_buffers=sizes.n_publish_buffers,
        slot_numel=slot_numel,
        n_journal_entries=sizes.n_threads,
        newest_first=int(sizes.newest_first),
    )
    contents: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "ranges": (torch.uint8, (len(partition.tiles), ctypes.sizeof(native.Range))),
        "blocks": (torch.uint8, (n_blocks, ctypes.sizeof(native.Block))),
        "step_records": (torch.uint8, (sizes.n_step_records, record_bytes)),
        "block_words": (torch.uint8, (n_blocks, WORD_BYTES)),
        "block_jobs": (torch.int64, (n_blocks,)),
        "block_shown": (torch.uint8, (n_blocks, ctypes.sizeof(native.BlockShown))),
        "journal": (torch.uint8, (sizes.n_threads, ctypes.sizeof(native.JournalEntry))),
        "master": (torch.float32, (numel,)),
        "exp_avg": (moments, (numel,)),
        "exp_avg_sq": (torch.uint8 if moments == torch.int8 else moments, (numel,)),
        "scales": (torch.float32, (header.n_scales, 2)),
        "slots": (dtype, (sizes.n_slots, slot_numel)),
        "publish": (dtype, (sizes.n_publish_buffers, slot_numel)),
    }
    sections, end = {}, native.HEADER_BYTES
    for name, (kind, shape) in contents.items():
        sections[name] = end, kind, shape
        setattr(header, f"{name}_offset", end)
        end = round_up(end + kind.itemsize * math.prod(shape), PAGE_BYTES)
    header.total_bytes = end
    return header, sections
