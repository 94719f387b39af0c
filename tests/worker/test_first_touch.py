"""The worker touches the optimizer states' memory before the trainer does, and no other memory."""

import os

import pytest

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero import build as assembly
from lightning_zenflow.zero.host_state import HostState
from models import OneGroup


def provided_bytes(fd: int) -> int:
    """Allocated bytes of a memory file."""
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("dtype, n_bytes", [("float32", 12), ("bfloat16", 8)])
def test_states_are_there_before_the_trainer_writes(dtype: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class LooksFirst(HostState):
        def __init__(self, *args, arena, **kwargs) -> None:  # type: ignore[no-untyped-def]
            seen.append((provided_bytes(arena.fd), n_bytes * arena.master.numel(), os.fstat(arena.fd).st_size))
            super().__init__(*args, arena=arena, **kwargs)

    monkeypatch.setattr(assembly, "HostState", LooksFirst)
    fit(
        OneGroup(length=2, shapes=[[512, 512]]),
        ZenFlowStrategy(worker_cores=1, publish_lag=1, moments_dtype=dtype),
        steps=1,
    )
    [(provided, states, everything)] = seen
    # Header and tables are the trainer's.
    assert states <= provided < states + 10 * 4096 < everything
