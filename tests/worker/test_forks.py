"""Children that are forked after a fit, such as the processes of a data loader, where the trainer of the fit is garbage."""

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from typing import Any

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
