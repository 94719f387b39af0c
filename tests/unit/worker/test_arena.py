"""Which of the arena's memory a device uses, and so is page-locked; moments of a rank that has only padding."""

import itertools
import mmap
import os
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core import device
from lightning_zenflow.core.device import PAGE_BYTES, RUNTIMES, HostRuntime
from lightning_zenflow.core.partition import build_partition, round_up
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.moments import CodedMoment
from small_arena import SIZES, make_partition


def arena_for(device_type: str) -> Arena:
    sizes = replace(SIZES, n_slots=6, dtype=torch.bfloat16)
    return Arena(make_partition(), sizes, device=torch.device(device_type))


def bytes_of(arena: Arena, tensor: Tensor) -> tuple[int, int]:
    """Bytes of the arena from a tensor's first to its last element."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr() - arena._address()
    return begin, begin + span * tensor.element_size()


def ranges_of_device(arena: Arena) -> list[tuple[int, int]]:
    """Reserved bytes [begin, end) that a device copies from or to: all but the states."""
    return [(begin, end) for begin, end in arena._reserved if begin != arena._header.master_offset]


def test_the_device_uses_all_reserved_memory_but_the_states() -> None:
    """Each byte is reserved once, and never given back."""
    arena, sizes = arena_for("cpu"), []
    for n_slots, n_buffers in ((0, 0), (2, 1), (2, 1), (1, 1), (3, 2)):
        arena.reserve(n_slots=n_slots, n_publish_buffers=n_buffers)
        sizes.append(arena.reserved_bytes)
    row_bytes = arena.slots[0].nbytes
    assert [size - sizes[0] for size in sizes] == [0, *[3 * row_bytes] * 3, 5 * row_bytes]
    ranges = ranges_of_device(arena)

    def inside(tensor: Tensor) -> bool:
        first, last = bytes_of(arena, tensor)
        return any(begin <= first and last <= end for begin, end in ranges)

    used = [*arena.slots[:3], *arena.publish[:2], *arena.step_words, *arena.block_words]
    assert all(map(inside, used))
    assert not any(inside(row) for row in [*arena.slots[3:], *arena.publish[2:]])
    for state in (arena.master, arena.exp_avg.array, arena.exp_avg_sq.array):
        first, last = bytes_of(arena, state)
        assert not any(first < end and begin < last for begin, end in ranges)
    assert sum(end - begin for begin, end in ranges) + 3 * round_up(4 * 2048, PAGE_BYTES) == arena.reserved_bytes
    arena.reserve(n_slots=6, n_publish_buffers=4)
    assert arena.reserved_bytes == os.fstat(arena.fd).st_size
    arena.close(keep_state=False)


def test_words_are_forgotten_whole() -> None:
    """A check that stayed would fit the stale factor when the step is repeated and its number arrives first."""
    arena = arena_for("cpu")
    for words in (arena.step_words, arena.block_words):
        words[1].copy_(step_word(torch.tensor(0.5), 7))
        assert int(words[1][2]) == 7
    arena.continue_from(0, 0)
    assert not arena.step_words.any() and not arena.block_words.any()
    arena.close(keep_state=False)


class Recording(HostRuntime):
    """A device that runs behind. Notes calls with the offset in the arena; `refused` of them fail, counted by name."""

    runs_behind = True
    arena: Arena
    calls: list[tuple[str, int]]
    refused: dict[str, set[int]]

    def call(self, name: str, address: int | None = None) -> None:
        self.calls.append((name, 0 if address is None else address - self.arena._address()))
        if sum(call == name for call, _ in self.calls) in self.refused.get(name, ()):
            raise RuntimeError(f"{name} failed")

    @override
    def page_lock(self, address: int, n_bytes: int) -> None:
        self.call("lock", address)

    @override
    def page_unlock(self, address: int) -> None:
        self.call("unlock", address)

    @override
    def synchronize(self) -> None:
        self.call("synchronize")


@pytest.fixture(params=[PAGE_BYTES, 16 * PAGE_BYTES])
def recording(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """The runtime of devices of type "cuda", on systems with memory pages of two sizes."""
    for room in ("core.device", "worker.arena"):
        monkeypatch.setattr(f"lightning_zenflow.{room}.PAGE_BYTES", request.param)
    monkeypatch.setitem(RUNTIMES, "cuda", Recording)
    Recording.calls, Recording.refused = [], {}
    Recording.arena = arena_for("cuda")
    return Recording


def test_what_is_page_locked_is_touched_before_and_unlocked_at_the_end(recording: type[Recording]) -> None:
    arena, calls = recording.arena, recording.calls

    def touch(offset: int, n_rows: int, row_bytes: int) -> None:
        calls.append((f"touch {n_rows} x {row_bytes}", offset))

    arena.reserve(n_slots=2, n_publish_buffers=1, touch=touch)
    first, slots = len(calls), bytes_of(arena, arena.slots)[0]
    arena.reserve(n_slots=5, n_publish_buffers=1, touch=touch)
    row_bytes = arena.slots[0].nbytes
    assert row_bytes >= 2 * max(block.end - block.begin for block in make_partition().blocks)
    assert calls[first:] == [
        (f"touch 3 x {row_bytes}", slots + 2 * row_bytes),
        ("lock", slots + 2 * row_bytes),
    ]
    locked = [address for call, address in calls if call == "lock"]
    assert locked == [begin for begin, _ in ranges_of_device(arena)]
    assert device.PAGE_BYTES % mmap.PAGESIZE == 0 and not any(begin % device.PAGE_BYTES for begin in locked)
    assert [address for call, address in calls if call.startswith("touch")] == locked
    calls.clear()
    arena.close(keep_state=False)
    assert calls == [("synchronize", 0), *(("unlock", begin) for begin in locked)]


def test_memory_that_cannot_be_page_locked_stays_pageable(
    recording: type[Recording], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so once; the rest is locked and unlocked."""
    arena, recording.refused = recording.arena, {"lock": {1, 3}}
    device.warn_of_pageable_memory.cache_clear()
    arena.reserve(n_slots=2, n_publish_buffers=1)
    arena.reserve(n_slots=5, n_publish_buffers=1)
    (warning,) = caplog.messages
    assert re.search("page-locked .lock failed.*make the training thread wait.*ulimit -l", warning)
    begins = [begin for begin, _ in ranges_of_device(arena)]
    assert len(begins) == 4
    assert [address for call, address in recording.calls if call == "lock"] == begins, "each is tried once"
    arena.close(keep_state=False)
    unlocked = [address for call, address in recording.calls if call == "unlock"]
    assert unlocked == [begin for i, begin in enumerate(begins, 1) if i not in (1, 3)]
    # Small memory beside the arena.
    empty = Mock(side_effect=[RuntimeError("cudaHostAlloc failed"), torch.empty(2, 3)])
    monkeypatch.setattr(torch, "empty", empty)
    device.warn_of_pageable_memory.cache_clear()
    assert recording(torch.device("cuda")).empty_on_host((2, 3), torch.int64).shape == (2, 3)
    assert "cudaHostAlloc failed" in caplog.text
    assert [made.kwargs.get("pin_memory") for made in empty.mock_calls] == [True, None]


def test_copies_are_page_locked_on_pages_of_their_own(recording: type[Recording]) -> None:
    """And take hardly more memory than their values: torch's allocator would round up to powers of two."""
    arena, ranges = recording.arena, list[tuple[int, int]]()
    for numel in (1, 2047, 2048, 2049, 300_001):
        values = torch.randn(numel).bfloat16()
        copy = arena.page_locked_copy(values)
        assert torch.equal(copy, values) and copy.data_ptr() % mmap.PAGESIZE == 0
        assert copy.untyped_storage().nbytes() <= values.nbytes + 2 * device.PAGE_BYTES
        ranges.append((copy.data_ptr(), copy.data_ptr() + copy.untyped_storage().nbytes()))
    locked = [arena._address() + offset for call, offset in recording.calls if call == "lock"]
    assert locked == [begin for begin, _ in ranges]
    # They are not freed before, whoever has dropped them.
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ranges)))
    arena.close(keep_state=False)
    assert [arena._address() + offset for call, offset in recording.calls if call == "unlock"] == locked
    assert arena.page_locked_copy(torch.ones(0)).numel() == 0


def test_after_a_fault_of_the_device_everything_is_released(
    recording: type[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    arena, recording.refused = recording.arena, {"synchronize": {1}, "unlock": {1, 2, 3}}
    arena.reserve(n_slots=5, n_publish_buffers=1)
    arena.slots.fill_(1.0)
    arena.publish.fill_(2.0)
    watched, taken = os.dup(arena.fd), list[tuple[Tensor, Tensor]]()
    arena.close(keep_state=False, take_weights=lambda: taken.append((arena.slots.clone(), arena.publish.clone())))
    # Weights are taken from the publish buffers when the slots are free.
    ((slots, weights),) = taken
    assert (slots == 0).all() and (weights == 2).all()
    assert os.fstat(watched).st_blocks == 0
    os.close(watched)
    assert arena.fd < 0
    assert [call for call, _ in recording.calls if call != "lock"] == ["synchronize", *["unlock"] * 3]
    assert len(caplog.records) == 4
    arena.close(keep_state=False)


def test_a_rank_with_only_padding_has_coded_moments() -> None:
    """As all other ranks have, which save together with it."""
    sizes = replace(SIZES, n_slots=0, moments_dtype=torch.int8)
    arena = Arena(build_partition([], [2], n_blocks=1), sizes, device=torch.device("cpu"))
    for moment in (arena.exp_avg, arena.exp_avg_sq):
        assert isinstance(moment, CodedMoment)
        assert torch.equal(moment.read(0, 2), torch.zeros(2))
        moment.write(0, torch.zeros(2))
        assert moment.stand_in(0, 2).isnan().all()
    arena.close(keep_state=False)
