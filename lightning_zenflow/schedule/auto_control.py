"""Measurements for `update_interval: auto` and `publish_lag: auto` in training, and agreement of the ranks on the next schedule."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.schedule.auto_policy import Decision, Observation, SchedulePolicy, observation_step
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.stalls import StallClock

_SHORTEST_OBSERVATION = 16
"""In steps."""


class ScheduleObserver:
    """Collects times of steps until they make an observation.

    Leaves out the steps right after a change of schedule, whose windows still have the old length, and the steps around an
    interruption such as a validation. Takes medians, since a single slow step (of the data loader, say) does not depend on the schedule.

    Args:
        schedule: the current one.
    """

    def __init__(self, schedule: UpdateSchedule) -> None:
        self._steps: list[tuple[float, float, float]] = []
        """[(device_s, worker_s, stall_s)]."""
        self.restart(schedule, schedule)

    def restart(self, before: UpdateSchedule, after: UpdateSchedule) -> None:
        """Begins a new observation after a change of schedule or an interruption."""
        self._length = max(_SHORTEST_OBSERVATION, after.update_interval)
        # One step more: the time of the first step after an interruption includes the interruption.
        self._left_out = 1 + max(before.update_interval, after.update_interval) + after.publish_lag
        self._steps.clear()

    @property
    def completes_next(self) -> bool:
        """Whether the next step completes an observation."""
        return self._left_out == 0 and len(self._steps) + 1 == self._length

    def add(self, *, device_s: float, worker_s: float, stall_s: float) -> tuple[float, float] | None:
        """Adds the times of one step.

        Args:
            device_s: seconds of the step without stall.
            worker_s: seconds that the worker computed for the jobs published in the step.
            stall_s: seconds spent waiting for the worker.

        Returns:
            `Observation.load` and `Observation.stall` once there are enough steps, else None.
        """
        if self._left_out > 0:
            self._left_out -= 1
            return None
        self._steps.append((device_s, worker_s, stall_s))
        if len(self._steps) < self._length:
            return None
        device, worker, stalls = zip(*self._steps, strict=True)
        self._steps.clear()
        load = statistics.median(worker) / max(statistics.median(device), 1e-9)
        return load, sum(stalls) / max(sum(device) + sum(stalls), 1e-9)


class ScheduleControl:
    """Observes steps, reduces observations over the ranks, and lets the policy decide.

    All ranks decide alike at the same steps. Used by one rank's training thread only. Never waits for the device: a reduced observation is
    read some steps later.

    Args:
        auto: the policy.
        stalls: clock of stall and of the worker's time.
        group: ranks that must agree.
        device: where observations are reduced.
    """

    def __init__(
        self, auto: SchedulePolicy, *, stalls: StallClock, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._auto = auto
        self._stalls = stalls
        self._group = group
        self._device = device
        self._observer = ScheduleObserver(auto.schedule)
        self._sent: tuple[int, AsyncHostCopy] | None = None
        """Step at whose end the reduced observation can be read, and the observation: see `_reduce`."""
        self.waits = False
        """Whether a decision is overdue because the schedule was not allowed to change."""
        self._last = self._clocks()

    @property
    def schedule(self) -> UpdateSchedule:
        """The current schedule."""
        return self._auto.schedule

    @property
    def observes_next(self) -> bool:
        """Whether the next step completes an observation, so that it should measure the gradient rule."""
        return self._sent is None and self._observer.completes_next

    def state_dict(self) -> dict[str, Any]:
        """State of the policy. Excludes unfinished observations: the flush before a checkpoint interrupts them."""
        return self._auto.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._auto.load_state_dict(state)
        self._sent = None
        self.waits = False
        self.interrupt()

    def interrupt(self) -> None:
        """Discards the unfinished observation, at a synchronous step or a flush."""
        self._observer.restart(self.schedule, self.schedule)
        self._last = self._clocks()

    def end_step(self, step: int, *, max_interval_by_gradients: Tensor | None, may_change: bool) -> Decision | None:
        """Adds a step to the observation; reduces a complete one, or reads a reduced one and decides.

        Args:
            step: number of the step.
            max_interval_by_gradients: 0-D on the device, the same on every rank; None if it was not measured.
            may_change: whether the schedule may change after this step; the same on every rank.

        Returns:
            A change of schedule, or None.
        """
        last, self._last = self._last, self._clocks()
        duration, stall, worker = (now - before for now, before in zip(self._last, last, strict=True))
        seen = self._observer.add(device_s=max(0.0, duration - stall), worker_s=worker, stall_s=stall)
        if seen is not None and self._sent is None:
            self._sent = observation_step(step, self.schedule), self._reduce(*seen, max_interval_by_gradients)
        if self._sent is None or step < self._sent[0]:
            self.waits = False
            return None
        self.waits = not may_change
        if self.waits:
            return None
        load, stall, interval = self._sent[1].read().tolist()
        self._sent = None
        before = self.schedule
        decision = self._auto.observe(Observation(load=load, stall=stall, max_interval_by_gradients=interval or None))
        if decision is not None:
            self._observer.restart(before, decision.schedule)
        return decision

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._stalls.device_s, self._stalls.worker_busy_s

    def _reduce(self, load: float, stall: float, max_interval_by_gradients: Tensor | None) -> AsyncHostCopy:
        """[load, stall, max_interval_by_gradients], the largest of all ranks, float64; an unknown interval is 0."""
        local = runtime_of(self._device).empty_on_host((3,), torch.float64)
        local.copy_(torch.tensor([load, stall, 0.0], dtype=torch.float64))
        values = local.to(self._device, non_blocking=True, copy=True)
        if max_interval_by_gradients is not None:
            values[2] = torch.nan_to_num(max_interval_by_gradients, nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return AsyncHostCopy(values)
