"""`update_interval: auto` and `publish_lag: auto` in training: measures, lets the ranks agree, and says when the schedule changes."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from lightning_zenflow.schedule.auto_policy import Decision, Observation, SchedulePolicy, observation_step
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.stalls import StallClock


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """An observation on its way: the largest of the ranks' numbers arrives in host memory behind the device's work."""

    read_step: int
    values: Tensor
    """[load, stall, max_interval_by_gradients], float64 on the CPU; page-locked for a CUDA device. A max_interval_by_gradients of 0 is not known."""
    arrived: torch.cuda.Event | None


class ScheduleControl:
    """Belongs to one rank's training thread; all ranks come to the same decisions at the same steps.

    Args:
        auto: what decides.
        stalls: where waiting and the worker's time are counted.
        group: the ranks that must agree.
        device: where the exchange happens.
    """

    def __init__(
        self, auto: SchedulePolicy, *, stalls: StallClock, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._auto = auto
        self._stalls = stalls
        self._group = group
        self._device = device
        self._observer = ScheduleObserver(auto.schedule)
        self._exchange: _Exchange | None = None
        self.waits = False
        """Whether a decision is due that had to wait because the schedule might not change."""
        self._last = self._clocks()

    @property
    def schedule(self) -> UpdateSchedule:
        """In force."""
        return self._auto.schedule

    @property
    def observes_next(self) -> bool:
        """Whether the next step completes an observation, for which the gradient rule's part is to be measured in it."""
        return self._exchange is None and self._observer.completes_next

    def state_dict(self) -> dict[str, Any]:
        """Of `SchedulePolicy`. What is being observed is not part of it: a checkpoint comes with a flush, which interrupts."""
        return self._auto.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._auto.load_state_dict(state)
        self._exchange = None
        self.waits = False
        self.interrupt()

    def interrupt(self) -> None:
        """The steps before and after this call have nothing to do with each other: a synchronous step, a flush."""
        self._observer.restart(self.schedule, self.schedule)
        self._last = self._clocks()

    def end_step(self, step: int, *, max_interval_by_gradients: Tensor | None, may_change: bool) -> Decision | None:
        """Counts a step; now and then the ranks exchange what they saw, and some steps later decide.

        Args:
            step: number of the step.
            max_interval_by_gradients: 0-D on the device, the same on every rank (`selection.max_interval_by_gradients`); None if it was not measured.
            may_change: whether the schedule may change after this step; the same on every rank.
        """
        last, self._last = self._last, self._clocks()
        duration, stall, worker = (now - before for now, before in zip(self._last, last, strict=True))
        seen = self._observer.add(device_s=max(0.0, duration - stall), worker_s=worker, stall_s=stall)
        if seen is not None and self._exchange is None:
            self._exchange = self._send(*seen, max_interval_by_gradients, observation_step(step, self.schedule))
        self.waits = self._exchange is not None and step >= self._exchange.read_step and not may_change
        if self._exchange is None or step < self._exchange.read_step or self.waits:
            return None
        before = self.schedule
        decision = self._auto.observe(_read(self._exchange))
        self._exchange = None
        if decision is not None:
            self._observer.restart(before, decision.schedule)
        return decision

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._stalls.device_s, self._stalls.worker_busy_s

    def _send(self, load: float, stall: float, max_interval_by_gradients: Tensor | None, read_step: int) -> _Exchange:
        on_cuda = self._device.type == "cuda"
        values = torch.tensor([load, stall, 0.0], dtype=torch.float64, pin_memory=on_cuda)
        message = values.to(self._device, non_blocking=True, copy=True)
        if max_interval_by_gradients is not None:
            message[2] = torch.nan_to_num(max_interval_by_gradients, nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        values.copy_(message, non_blocking=True)
        arrived = None
        if on_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _Exchange(read_step=read_step, values=values, arrived=arrived)


def _read(exchange: _Exchange) -> Observation:
    if exchange.arrived is not None:
        exchange.arrived.synchronize()  # long since, by `observation_step`
    load, stall, max_interval_by_gradients = exchange.values.tolist()
    return Observation(load=load, stall=stall, max_interval_by_gradients=max_interval_by_gradients or None)


_SHORTEST_PERIOD = 16


class ScheduleObserver:
    """Collects times of steps until they make an observation.

    The steps right after a change are left out: their windows still have the old length. So is everything around an interruption, such as a
    validation. Medians, because a single slow step (a data loader that hiccups) says nothing about the schedule.

    Args:
        schedule: in force.
    """

    def __init__(self, schedule: UpdateSchedule) -> None:
        self._device_s: list[float] = []
        self._worker_s: list[float] = []
        self._stall_s: list[float] = []
        self._left_out = 0
        self.restart(schedule, schedule)

    def restart(self, before: UpdateSchedule, after: UpdateSchedule) -> None:
        """Begins anew with the next step: the schedule has changed, or something has come between the steps."""
        self._length = max(_SHORTEST_PERIOD, after.update_interval)
        # One step more: the first one after an interruption counts the time of the interruption.
        self._left_out = 1 + max(before.update_interval, after.update_interval) + after.publish_lag
        self._clear()

    @property
    def completes_next(self) -> bool:
        """Whether the next step completes an observation."""
        return self._left_out == 0 and len(self._device_s) + 1 == self._length

    def add(self, *, device_s: float, worker_s: float, stall_s: float) -> tuple[float, float] | None:
        """Takes one step's times.

        Args:
            device_s: seconds that the step took without waiting for the worker.
            worker_s: seconds that the worker computed for the jobs published in it.
            stall_s: seconds spent waiting for the worker.

        Returns:
            Load and stall share (see `auto_schedule.Observation`) once there are enough steps, else None.
        """
        if self._left_out > 0:
            self._left_out -= 1
            return None
        self._device_s.append(device_s)
        self._worker_s.append(worker_s)
        self._stall_s.append(stall_s)
        if len(self._device_s) < self._length:
            return None
        load = statistics.median(self._worker_s) / max(statistics.median(self._device_s), 1e-9)
        stall = sum(self._stall_s) / max(sum(self._device_s) + sum(self._stall_s), 1e-9)
        self._clear()
        return load, stall

    def _clear(self) -> None:
        self._device_s.clear()
        self._worker_s.clear()
        self._stall_s.clear()
