"""Set-up of all tests."""

import os
from collections.abc import Iterator

import pytest

# The models are tiny and the worker's cores are the trainer's: threads that wait for each other actively only slow one another down.
# Set before torch is imported; where it is not set, Lightning chooses more.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def no_worker_is_left() -> Iterator[None]:
    """Fails a test after which a worker process of this process remains."""
    from harness import workers  # imports torch and DeepSpeed, which not every test needs

    yield
    assert workers() == []
