"""Which of the arena's memory a device uses, and so is page-locked."""

import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena, ArenaSizes
from small_arena import GROUPS, make_partition

EXPORT_BYTES = 5000


def arena_for(device: str, moments_dtype: torch.dtype = torch.float32) -> tuple[Arena, Partition]:
    partition = make_partition()
    sizes = ArenaSizes(
        n_param_groups=len(GROUPS),
        n_step_records=16,
        n_slots=6,
        n_publish_buffers=4,
        dtype=torch.bfloat16,
        moments_dtype=moments_dtype,
        export_bytes=EXPORT_BYTES,
    )
    return Arena(partition, sizes, device=torch.device(device)), partition


@pytest.mark.parametrize("dtype, n_bytes", [(torch.float32, 12), (torch.bfloat16, 8)])
def test_bytes_of_the_states(dtype: torch.dtype, n_bytes: int) -> None:
    arena, partition = arena_for("cpu", dtype)
    states = (arena.master, arena.exp_avg, arena.exp_avg_sq)
    assert [state.dtype for state in states] == [torch.float32, dtype, dtype]
    assert sum(state.nbytes for state in states) == n_bytes * partition.numel
    begins = [bytes_of(arena, state)[0] for state in states]
    assert (
        begins == sorted(begins) and bytes_of(arena, arena.slots)[0] - begins[0] < n_bytes * partition.numel + 3 * 4096
    )
    arena.close(keep_state=False)


def bytes_of(arena: Arena, tensor: Tensor) -> tuple[int, int]:
    """Bytes of the arena from a tensor's first to its last element."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr() - arena._address()
    return begin, begin + span * tensor.element_size()


def test_the_device_uses_all_reserved_memory_but_the_states() -> None:
    arena, _ = arena_for("cpu")
    arena.reserve(n_slots=2, n_publish_buffers=1)
    arena.reserve(n_slots=3, n_publish_buffers=2)
    ranges = arena.ranges_of_device()

    def inside(tensor: Tensor) -> bool:
        first, last = bytes_of(arena, tensor)
        return any(begin <= first and last <= end for begin, end in ranges)

    words = [field for words in (arena.step_words, arena.block_words) for field in (words.clip, words.sequence)]
    assert all(inside(tensor) for tensor in [*arena.slots[:3], *arena.publish[:2], arena.export, *words])
    assert not any(inside(row) for row in [*arena.slots[3:], *arena.publish[2:]])
    for state in (arena.master, arena.exp_avg, arena.exp_avg_sq):
        first, last = bytes_of(arena, state)
        assert not any(first < end and begin < last for begin, end in ranges)
    assert sum(end - begin for begin, end in ranges) + 3 * 4 * 2048 == arena.reserved_bytes
    arena.close(keep_state=False)


def test_what_is_page_locked_is_touched_before_and_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Recording(HostRuntime):
        runs_behind = True

        def page_lock(self, address: int, n_bytes: int) -> None:
            calls.append(("lock", address - arena._address()))

        def page_unlock(self, address: int) -> None:
            calls.append(("unlock", address - arena._address()))

        def synchronize(self) -> None:
            calls.append(("synchronize", 0))

    monkeypatch.setitem(RUNTIMES, "cuda", Recording)
    arena, partition = arena_for("cuda")

    def touch(offset: int, n_rows: int, row_bytes: int) -> None:
        calls.append((f"touch {n_rows} x {row_bytes}", offset))

    arena.reserve(n_slots=2, n_publish_buffers=1, touch=touch)
    first, slots = len(calls), bytes_of(arena, arena.slots)[0]
    arena.reserve(n_slots=5, n_publish_buffers=1, touch=touch)
    row_bytes = arena.slots[0].nbytes
    assert row_bytes >= 2 * partition.block_numel
    assert calls[first:] == [
        (f"touch 3 x {row_bytes}", slots + 2 * row_bytes),
        ("lock", slots + 2 * row_bytes),
    ]
    locked = [address for call, address in calls if call == "lock"]
    assert locked == [begin for begin, _ in arena.ranges_of_device()]
    assert [address for call, address in calls if call.startswith("touch")] == locked
    calls.clear()
    arena.close(keep_state=False)
    assert calls == [("synchronize", 0), *(("unlock", begin) for begin in locked)]
