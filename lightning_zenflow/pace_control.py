"""`update_interval: auto` and `publish_lag: auto` in training: measures, lets the ranks agree, and says when the pace changes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from lightning_zenflow.auto_schedule import AutoSchedule, Decision, Observation, Pace, observation_step
from lightning_zenflow.pace_observer import PaceObserver
from lightning_zenflow.stalls import StallClock


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """An observation on its way: the largest of the ranks' numbers arrives in host memory behind the device's work."""

    read_step: int
    values: Tensor
    """[load, stall, deferral], float64 on the CPU; page-locked for a CUDA device. A deferral of 0 is not known."""
    arrived: torch.cuda.Event | None


class PaceControl:
    """Belongs to one rank's training thread; all ranks come to the same decisions at the same steps.

    Args:
        auto: what decides.
        stalls: where waiting and the worker's time are counted.
        group: the ranks that must agree.
        device: where the exchange happens.
    """

    def __init__(
        self, auto: AutoSchedule, *, stalls: StallClock, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._auto = auto
        self._stalls = stalls
        self._group = group
        self._device = device
        self._observer = PaceObserver(auto.pace)
        self._exchange: _Exchange | None = None
        self.waits = False
        """Whether a decision is due that had to wait because the pace might not change."""
        self._last = self._clocks()

    @property
    def pace(self) -> Pace:
        """In force."""
        return self._auto.pace

    @property
    def observes_next(self) -> bool:
        """Whether the next step completes an observation, for which the gradient rule's part is to be measured in it."""
        return self._exchange is None and self._observer.completes_next

    def state_dict(self) -> dict[str, Any]:
        """Of `AutoSchedule`. What is being observed is not part of it: a checkpoint comes with a flush, which interrupts."""
        return self._auto.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._auto.load_state_dict(state)
        self._exchange = None
        self.waits = False
        self.interrupt()

    def interrupt(self) -> None:
        """The steps before and after this call have nothing to do with each other: a synchronous step, a flush."""
        self._observer.restart(self.pace, self.pace)
        self._last = self._clocks()

    def end_step(self, step: int, *, deferral: Tensor | None, may_change: bool) -> Decision | None:
        """Counts a step; now and then the ranks exchange what they saw, and some steps later decide.

        Args:
            step: number of the step.
            deferral: 0-D on the device, the same on every rank (`selection.deferral`); None if it was not measured.
            may_change: whether the pace may change after this step; the same on every rank.
        """
        last, self._last = self._last, self._clocks()
        duration, stall, worker = (now - before for now, before in zip(self._last, last, strict=True))
        seen = self._observer.add(device_s=max(0.0, duration - stall), worker_s=worker, stall_s=stall)
        if seen is not None and self._exchange is None:
            self._exchange = self._send(*seen, deferral, observation_step(step, self.pace))
        self.waits = self._exchange is not None and step >= self._exchange.read_step and not may_change
        if self._exchange is None or step < self._exchange.read_step or self.waits:
            return None
        before = self.pace
        decision = self._auto.observe(_read(self._exchange))
        self._exchange = None
        if decision is not None:
            self._observer.restart(before, decision.pace)
        return decision

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._stalls.device_s, self._stalls.worker_busy_s

    def _send(self, load: float, stall: float, deferral: Tensor | None, read_step: int) -> _Exchange:
        on_cuda = self._device.type == "cuda"
        values = torch.tensor([load, stall, 0.0], dtype=torch.float64, pin_memory=on_cuda)
        message = values.to(self._device, non_blocking=True, copy=True)
        if deferral is not None:
            message[2] = torch.nan_to_num(deferral, nan=0.0, posinf=0.0, neginf=0.0)
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
    load, stall, deferral = exchange.values.tolist()
    return Observation(load=load, stall=stall, deferral=deferral or None)
