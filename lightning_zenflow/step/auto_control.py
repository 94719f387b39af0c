"""`update_interval: auto` and `publish_lag: auto` in training: measurements, and agreement of the ranks on the next schedule."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.schedule.auto_policy import SchedulePolicy, load_and_stall
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.step.context import StepPlan
from lightning_zenflow.worker.rank_state import RankState

_LOOK = 16
"""Steps that are measured before a look, at least S of them."""


class ScheduleControl:
    """Measures steps, reduces what it measured over the ranks, lets the policy decide, and measures again.

    All ranks decide alike at the same steps.

    Not measured are the first steps, which compile and touch memory, the steps right after a decision, whose windows may still have the
    old length, and the steps around an interruption such as a validation. Used by one rank's training thread only. Never waits for the
    device: reduced numbers are read some steps later.

    Args:
        auto: the policy.
        rank: its clocks are read.
        group: ranks that must agree.
    """

    def __init__(self, auto: SchedulePolicy, rank: RankState, *, group: dist.ProcessGroup) -> None:
        self._auto = auto
        self._rank = rank
        self._group = group
        self._steps: list[tuple[float, float, float]] = []  # see `load_and_stall`
        self._sent: tuple[int, AsyncHostCopy] | None = None
        """Step at whose end the reduced numbers can be read, and these numbers (see `_reduce`)."""
        self.interrupt()

    @property
    def schedule(self) -> UpdateSchedule:
        """The current schedule."""
        return self._auto.schedule

    def state_dict(self) -> dict[str, Any]:
        """The schedule, as plain numbers. Excludes measured steps."""
        return asdict(self.schedule)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._auto.restore(UpdateSchedule(**state))
        self._sent = None
        self._steps.clear()
        self.interrupt()

    def waits(self, step: int) -> bool:
        """Whether a decision is overdue before `step` because the schedule was not allowed to change."""
        return self._sent is not None and step > self._sent[0]

    def interrupt(self, longest: int = 0) -> None:
        """Leaves out the next steps, after a synchronous step, a flush, or a look. Open windows have at most `longest` steps, or S."""
        s, d = self.schedule.update_interval, self.schedule.publish_lag
        # One step more: the time of the first step after an interruption includes the interruption.
        self._left_out = 1 + max(s, longest) + d
        self._last = self._clocks()

    def end_step(self, step: int, plan: StepPlan, *, may_change: bool) -> str | None:
        """Adds a step to the measured ones; reduces them when they are enough, or reads what was reduced and decides.

        Args:
            step: number of the step.
            plan: kind of the step. One that changes columns waits for reasons of its own and is left out. In a synchronous one the worker
                computes for one gradient, as with S = 1, and its wait is not the schedule's.
            may_change: whether the schedule may change after this step; the same on every rank.

        Returns:
            Reason of a change of `schedule`; None if it does not change.
        """
        last, self._last = self._last, self._clocks()
        duration, waited, worker = (now - before for now, before in zip(self._last, last, strict=True))
        if plan.synchronous and self.schedule.update_interval > 1:
            self.interrupt()
        elif self._left_out and not plan.changes_columns:
            self._left_out -= 1
        elif self._sent is None and not plan.changes_columns:
            self._steps.append((max(0.0, duration - waited), worker, 0.0 if plan.synchronous else waited))
        if self._sent is None and len(self._steps) == max(_LOOK, self.schedule.update_interval):
            load, stall = load_and_stall(self._steps)
            # The jobs published at that step are submitted after this one, so the device has finished the reduction before.
            readable = step + self.schedule.publish_lag + 1
            self._sent = readable, self._reduce(load, stall)
        if self._sent is None or step < self._sent[0] or not may_change:
            return None
        load, stall = self._sent[1].read().tolist()
        self._sent = None
        self._steps.clear()
        longest = self.schedule.update_interval
        reason = self._auto.observe(load, stall)
        self.interrupt(longest)
        return reason

    def _clocks(self) -> tuple[float, float, float]:
        stalls = self._rank.telemetry.stalls
        return time.perf_counter(), stalls.device_s, stalls.worker_busy_s

    def _reduce(self, load: float, stall: float) -> AsyncHostCopy:
        """The largest of all ranks, float64: [load, stall]."""
        local = torch.tensor([load, stall], dtype=torch.float64, device="cpu")
        runtime = runtime_of(self._rank.device)
        # From page-locked memory, so that the host does not wait for the copy.
        values = runtime.to_device(runtime.empty_on_host(local.shape, local.dtype).copy_(local))
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return AsyncHostCopy(values)
