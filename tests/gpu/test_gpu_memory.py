"""On a CUDA device: page-locked memory, and how much of the device's is used."""

import gc
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import At
from gpu_cases import MILLISECOND, device
from harness import APPROXIMATE, Case, optimizer_of, run_here
from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.worker.arena import Arena
from small_arena import SIZES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n_first", [1, 3, 5])
def test_every_page_is_page_locked_and_copied_without_waiting(n_first: int) -> None:
    """Slots are reserved little by little, as the schedule grows; a copy into one must not cross from one reservation to the next."""
    numel, n_slots = 5 * 7 * 1237, 8
    whole = Slice.of((35, 1237), parameter=0, param_group=0, begin=0, start=0, numel=numel)
    sizes = replace(SIZES, n_step_records=4, n_slots=n_slots, dtype=torch.bfloat16)
    arena = Arena(build_partition([whole], [numel], 1), sizes, device=device())
    try:
        for n in (n_first, n_first + 1, n_slots):
            arena.reserve(n_slots=n, n_publish_buffers=min(n, 4))
        gradients = torch.randn(n_slots, arena.slots.shape[1], device=device()).bfloat16()
        # The host waits for the device where it loads what it launches for the first time.
        arena.word_of(6).copy_(step_word(torch.full((), 1.0, device=device()), 6), non_blocking=True)
        assert arena.step_words[1].is_pinned() and arena.block_words[0].is_pinned()
        assert not any(state.is_pinned() for state in (arena.master, arena.exp_avg.array, arena.exp_avg_sq.array))
        torch.cuda.synchronize()
        torch.cuda._sleep(500 * MILLISECOND)
        done = torch.cuda.Event()
        for slot, gradient in zip(arena.slots, gradients, strict=True):
            assert slot.is_pinned() and slot[-1:].is_pinned()
            slot.copy_(gradient, non_blocking=True)
        arena.word_of(7).copy_(step_word(torch.full((), 0.5, device=device()), 7), non_blocking=True)
        done.record()
        assert not done.query(), "a copy waited for the device"
        done.synchronize()
        assert torch.equal(arena.slots, gradients.cpu())
        assert torch.equal(arena.step_words[3], step_word(torch.tensor(0.5), 7))
        back = torch.empty_like(gradients[:4])
        for target, buffer in zip(back, arena.publish, strict=True):
            buffer.copy_(arena.slots[0])
            target.copy_(buffer, non_blocking=True)
        assert all(torch.equal(b, gradients[0]) for b in back)
    finally:
        arena.close(keep_state=False)


def test_training_goes_on_after_page_locking_was_refused() -> None:
    """The refusal is no error of the next launch."""
    memory = torch.empty(2**20, dtype=torch.uint8)
    runtime = runtime_of(device())
    runtime.page_lock(memory.data_ptr(), memory.nbytes)
    try:
        with pytest.raises(RuntimeError, match="cudaHostRegister failed with CUDA error"):
            runtime.page_lock(memory.data_ptr(), memory.nbytes)
        assert int(torch.full((3,), 7, device=device()).sum()) == 21
    finally:
        runtime.page_unlock(memory.data_ptr())


def test_room_without_the_peak_of_the_start() -> None:
    """Memory that was used before the first step, and is cached since, is room."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    torch.empty(free * 8 // 10, dtype=torch.uint8, device=device())
    assert runtime_of(device()).room() < free // 2
    runtime_of(device()).forget_peak()
    assert runtime_of(device()).room() >= free // 2
    torch.cuda.empty_cache()


def test_memory_ceiling() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    width, layers, bucket = 2048, 24, 8_000_000
    given: dict[str, Any] = {"precision": "bf16-true", "accelerator": "gpu", "strategy_options": APPROXIMATE}
    options = {"widths": [width] * (layers + 1)}
    case = Case(model="Perceptron", model_options=options, recorded=False, max_norm=1.0, steps=16, **given)
    case = case.with_keys(reduce_bucket_size=bucket, allgather_bucket_size=bucket)
    # In the steps from the tenth on.
    peaks, owned = list[int](), list[int]()

    def look(trainer: pl.Trainer) -> None:
        if trainer.global_step == 10:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        peaks.append(torch.cuda.max_memory_allocated())
        columns = optimizer_of(trainer).training.parts.ownership.current
        owned.append(0 if columns is None else columns.numel)

    run_here(case, callbacks=[At("on_train_batch_end", look)])
    numel = layers * (width * width + width)
    assert 0.04 * numel < owned[-1] < 0.06 * numel
    weights, buckets = 2 * numel, 2 * 2 * bucket
    columns = (2 + 12) * owned[-1]
    # At S = 4 and d = 1 a quarter of the gradients waits for a publish.
    repeated = 2 * numel // 4
    # Of one matrix: gradients before they are in a bucket, and torch's temporary values where there is no Triton.
    working = 24 * width * width
    allowed = weights + buckets + columns + repeated + working
    # On top: what cuBLAS keeps for itself, 32 MiB for each of its handles.
    used = peaks[-1] - before
    assert used < 1.1 * allowed + 96 * 2**20, (used, allowed, weights, buckets, columns, repeated, working)
