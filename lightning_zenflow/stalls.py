"""Clocks and counters: where the training thread waited, and what the worker did meanwhile."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Cause = Literal["publish_wait", "publish_buffer", "select", "flush"]
"""Why the training thread waited: for a round that is due; for the device before a buffer is reused; for the proxies of a selection; for
everything, in a flush."""


class StallClock:
    """Adds up seconds by cause. Belongs to one rank's training thread."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._worker_busy_s = 0.0
        self.steps = 0
        """Optimizer steps counted."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds waited since the start, by cause."""
        return dict(self._seconds)

    @property
    def worker_busy_s(self) -> float:
        """Seconds the worker computed since the start."""
        return self._worker_busy_s

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """Counts the time spent inside as waiting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[cause] += time.perf_counter() - begin

    def add_worker_time(self, busy_s: float) -> None:
        """Counts what the worker reported of one round."""
        self._worker_busy_s += busy_s
