from collections.abc import Iterator

import pytest

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from small_arena import make_arena, make_partition


@pytest.fixture
def partition() -> Partition:
    return make_partition()


@pytest.fixture
def arena(partition: Partition) -> Iterator[Arena]:
    arena = make_arena(partition)
    yield arena
    arena.close(keep_state=False)


@pytest.fixture
def two_cores() -> list[int]:
    """For a worker of two threads, which one core cannot have: each has a core of its own."""
    cores = allowed_cores()[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    return cores
