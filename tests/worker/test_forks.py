"""Children that are forked after a fit, such as the processes of a data loader, where the trainer of the fit is garbage."""

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader
from typing_extensions import override

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from models import Indexes, LinearLossModule
from processes import arena_mappings
from small_arena import make_arena, make_partition

MIB = 2**20


def exits_with_0(child: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_child_that_collects_the_arena_of_an_earlier_fit() -> None:
    """The child's own memory is where the arena was, and stays there."""
    gc.collect()
    before = set(arena_mappings())
    garbage: list[Any] = [make_arena(make_partition(), n_slots=16 * MIB // 4096)]
    garbage.append(garbage)
    (arena,) = set(arena_mappings()) - before
    del garbage

    def child() -> None:
        own: list[mmap.mmap] = []
        # Smaller holes may be filled first.
        while not own or not arena[0] <= ctypes.addressof(ctypes.c_char.from_buffer(own[-1])) < arena[1]:
            own.append(mmap.mmap(-1, 4 * MIB))
            own[-1][0] = len(own) % 256
            assert len(own) < 5000
        gc.collect()
        assert all(memory[0] == (i + 1) % 256 for i, memory in enumerate(own))

    exits_with_0(child)
    gc.collect()
    assert arena not in arena_mappings()


class Allocating(Indexes):
    """A dataset that builds an index of its samples in each process of a loader."""

    index: list[list[int]] | None = None

    @override
    def __getitem__(self, item: int) -> int:
        if self.index is None:
            self.index = [[i] for i in range(400_000)]
        return super().__getitem__(item)


class LoadsInAnotherProcess(LinearLossModule):
    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Allocating(self.length), num_workers=1, multiprocessing_context="fork")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sweeps_in_one_process() -> None:
    """20 sweeps of 5 fits. Nothing collects garbage between them but Python itself."""
    for _ in range(20 * 5):
        fit(LoadsInAnotherProcess(shapes=[(256, 256)] * 16 + [(9,)]), ZenFlowStrategy(update_interval=1, publish_lag=0))
