from collections.abc import Iterator

import pytest

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena
from small_arena import make_arena, make_partition


@pytest.fixture
def partition() -> Partition:
    return make_partition()


@pytest.fixture
def arena(partition: Partition) -> Iterator[Arena]:
    arena = make_arena(partition)
    yield arena
    arena.close(keep_state=False)
