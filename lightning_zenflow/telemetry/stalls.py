"""Clocks and counters: where the training thread and the device waited, and what the worker did meanwhile."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.telemetry.tracing import Tracer

Cause = Literal["publish_wait", "publish_buffer", "select", "flush", "restart", "timeline"]
"""Why the training thread waited: for a round that is due; for the device before a buffer is reused; for the proxies of a selection and the
state of the selected columns; for everything, in a flush; for a new worker, when the one before was found dead at a hand-over; for the
device, before a timeline is recorded."""

CAUSES: tuple[Cause, ...] = get_args(Cause)


class StallClock:
    """Adds up seconds by cause. Belongs to one rank's training thread.

    On a CUDA device the training thread runs ahead, so its waiting need not be the device's. What the device waited is the time between an
    event before the wait and one after it: the first is reached when the work enqueued so far is done, the second is enqueued only
    when the wait is over. Such times are added once the device has reached them, a step or so later; nothing waits for them.

    Args:
        device: what trains.
        tracer: is told of every wait and of the worker's jobs.
    """

    def __init__(self, device: torch.device, tracer: Tracer) -> None:
        self._on_cuda = device.type == "cuda"
        self._tracer = tracer
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._device_seconds: defaultdict[str, float] = defaultdict(float)
        self._worker_busy_s = 0.0
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.steps = 0
        """Optimizer steps counted."""
        self.worker_restarts = 0
        """Workers that were started in place of one that a signal had ended."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that the training thread waited since the start, by cause."""
        return dict(self._seconds)

    @property
    def device_seconds(self) -> dict[str, float]:
        """Seconds since the start that the device had nothing to do because of waiting, by cause."""
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            cause, before, after = self._events.popleft()
            self._device_seconds[cause] += 1e-3 * before.elapsed_time(after)
        return dict(self._device_seconds)

    @property
    def device_s(self) -> float:
        """Seconds since the start that the device had nothing to do because of waiting, whatever the cause."""
        return sum(self.device_seconds.values())

    @property
    def worker_busy_s(self) -> float:
        """Seconds the worker computed since the start."""
        return self._worker_busy_s

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """Counts the time spent inside as waiting."""
        before = self._event()
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            end_ns = time.perf_counter_ns()
            seconds = 1e-9 * (end_ns - begin_ns)
            self._seconds[cause] += seconds
            after = self._event()
            if before is None or after is None:
                self._device_seconds[cause] += seconds
                self._tracer.add_wait(cause, begin_ns, end_ns, None)
            else:
                self._events.append((cause, before, after))
                self._tracer.add_wait(cause, begin_ns, end_ns, (before, after))

    def add_job(self, block: int, completion: Completion) -> None:
        """Counts what the worker reported of one round."""
        self._worker_busy_s += 1e-9 * completion.busy_ns
        self._tracer.add_job(block, completion)

    def _event(self) -> torch.cuda.Event | None:
        if not self._on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
