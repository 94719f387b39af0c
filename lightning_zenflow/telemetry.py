"""Waits of one rank's training thread and device by cause, byte counts, and a snapshot of all counters."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.profiler import record_function

from lightning_zenflow.core.device import DeviceNumber, Event, runtime_of

Cause = Literal[
    "publish_wait", "slot", "correction", "publish_buffer", "select", "flush", "restart", "reserve", "loss_scale"
]
"""Cause of a wait of the training thread:

* "publish_wait": a job that is due is not done;
* "slot": in backward, all gradient slots or publish buffers are in use by jobs that are not done;
* "correction": weights that were shown with another clip factor than the true one are published again;
* "publish_buffer": the device still reads a buffer that is about to be reused;
* "select": the proxies of a selection are read, and the state of the selected columns is gathered;
* "flush": all open windows are completed, and the state of the device-owned columns is gathered; or it is looked for weights that the user
  has written, before a flush;
* "restart": a killed worker is replaced, found at a submission;
* "reserve": slots and publish buffers for a longer window or lag are allocated and page-locked;
* "loss_scale": a dynamic loss scale (fp16) needs to know whether the step overflowed.
"""

CAUSES: tuple[Cause, ...] = get_args(Cause)

_WATCHED = 16
"""Steps that are looked at one by one for skipped ones, and then the interval between two looks."""


_TOTALS = (
    "steps", "host_stall_s", "worker_busy_s", "followed_steps", "in_backward_jobs", "late_jobs", "steps_in_backward", "corrected_steps"
)  # fmt: skip
"""Fields of a reading that `since` counts from the earlier one on, beside `device_stall_s`."""


@dataclass(kw_only=True)
class Reading:
    """A rank's counters, since the start: those that `Telemetry.counts` has, and in a snapshot of them what `StepParts.read_counters` asks
    for besides.
    """

    steps: int = 0
    host_stall_s: float = 0.0
    """Seconds of waiting of the training thread."""
    device_stall_s: Mapping[str, float] = field(default_factory=dict)
    """By cause (`CAUSES`). Causes that have not occurred may be missing."""
    worker_busy_s: float = 0.0
    """Seconds of computation of the worker."""
    worker_restarts: int = 0
    """Restarts of a worker that a signal had killed."""
    followed_steps: int = 0
    """Steps with a flush behind them because the user had written weights in place shortly before."""
    skipped_steps: int = 0
    in_backward_jobs: int = 0
    """Blocks that were submitted in backward and published."""
    late_jobs: int = 0
    """Those of them that were not done when the training thread waited for them."""
    factor_error: float | None = None
    """Mean relative error of the clip factors of a step's jobs in backward; None until measured."""
    steps_in_backward: int = 0
    """Steps in which blocks were submitted in backward."""
    corrected_steps: int = 0
    """Steps that some block would have shown with another clip factor than the true one; with `clip_prediction: false`."""
    update_interval: int = 0
    publish_lag: int = 0
    owned_norm_share: float | None = None
    """Share of the gradient's squared norm in device-owned columns, 0 to 1; None until measured."""
    resident_share: float | None = None
    """Share of the blocks whose optimizer state the device has, 0 to 1; None: of none."""
    movable_bytes: int = 0
    """Device memory that all of them with their gradients would take; 0 where the device cannot have them."""

    @property
    def late_share(self) -> float | None:
        """Share of the late jobs in those submitted in backward; None without any."""
        return self.late_jobs / self.in_backward_jobs if self.in_backward_jobs else None

    def since(self, before: "Reading") -> "Reading":
        """This reading with times and counts from an earlier one on, and waits for every cause. Skipped steps and restarts are of all."""
        changes: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _TOTALS}
        now, then = self.device_stall_s, before.device_stall_s
        changes["device_stall_s"] = {cause: now.get(cause, 0.0) - then.get(cause, 0.0) for cause in CAUSES}
        return replace(self, **changes)


class Telemetry:
    """Clocks and byte counts of one rank, since the start. The training thread alone writes them, in every component that waits, works or
    copies; monitors read them between steps.

    A CUDA device executes asynchronously, so a wait of the training thread is not always a wait of the device. The device's share is the
    time between two events: the first is recorded before the wait and reached when the work enqueued so far is done, the second is
    recorded after the wait. Elapsed times are read without synchronisation, once the device has reached both.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self.counts = Reading()
        """Whoever counts something increments it here."""
        self._device_seconds: defaultdict[str, float] = defaultdict(float)
        self._events: deque[tuple[str, Event, Event]] = deque()
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """On the device: optimizer steps that changed nothing because their gradient norm was not finite."""
        self._n_skipped = DeviceNumber()
        self._has_warned = False
        # On a CPU device: bytes that would cross PCIe beside a GPU.
        self.d2h_bytes = 0
        """Device to host: gradients, their sums over micro-batches, clip factors and step numbers, state of device-owned entries."""
        self.h2d_bytes = 0
        """Host to device: published weights, sums over micro-batches, gradients that are reapplied after a publish, state of device-owned
        entries."""

    def read_skipped(self) -> int:
        """`skipped` as of an earlier call. Never waits."""
        self._n_skipped.copy(self.skipped)
        return int(self._n_skipped.read() or 0)

    def warn_of_skipped(self, step: int) -> None:
        """Warns once, soon after the first step that changed nothing; not to be called where a loss scale is searched for."""
        if self._has_warned or (step > _WATCHED and step % _WATCHED):
            return
        if n := self.read_skipped():
            self._has_warned = True
            rank_zero_warn(
                f"ZenFlow: {n} of {step} steps so far were skipped, as their gradient was not finite: they changed no weight. Look for"
                " NaN in batches and loss, or lower the learning rate"
            )

    @property
    def device_seconds(self) -> dict[str, float]:
        """Seconds that the device was idle because of a wait, by cause."""
        self._add_reached()
        return dict(self._device_seconds)

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """Adds the time spent in the context to a cause; `torch.profiler` shows the context as "zenflow wait: (cause)"."""
        # Here as well, because no monitor reads the times on most ranks: the device would keep two events a wait.
        self._add_reached()
        before = self._runtime.record_event(timing=True) if self._runtime.runs_behind else None
        begin_ns = time.perf_counter_ns()
        try:
            with record_function(f"zenflow wait: {cause}"):
                yield
        finally:
            seconds = 1e-9 * (time.perf_counter_ns() - begin_ns)
            self.counts.host_stall_s += seconds
            if before is None:
                self._device_seconds[cause] += seconds
            else:
                self._events.append((cause, before, self._runtime.record_event(timing=True)))

    def _add_reached(self) -> None:
        """Adds the times between events that the device has reached, and drops the events."""
        while self._events and self._events[0][2].query():
            cause, before, after = self._events.popleft()
            self._device_seconds[cause] += 1e-3 * before.elapsed_time(after)
