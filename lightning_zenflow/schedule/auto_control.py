"""Measurements for `update_interval: auto` and `publish_lag: auto` in training, and agreement of the ranks on the next schedule."""

import statistics
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.schedule.auto_policy import (
    Decision,
    Observation,
    SchedulePolicy,
    blocks_waited_for,
    observation_step,
)
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.stalls import StallClock

_FIRST_OBSERVATION, _SHORTEST_OBSERVATION = 4, 16
"""In steps. The first one decides where the schedule begins."""


class StepKind(Protocol):
    """Kind of a step, as far as it concerns the observation."""

    @property
    def synchronous(self) -> bool:
        """Every window closes and is published in the step itself."""

    @property
    def changes_columns(self) -> bool:
        """Blocks change their columns from this step on."""


class ScheduleObserver:
    """Collects times of steps until they make an observation.

    Leaves out the first steps, which compile and touch memory, the steps right after a change of schedule, whose windows still have the old
    length, and the steps around an interruption such as a validation. Takes medians, since a single slow step (of the data loader, say)
    does not depend on the schedule.

    Args:
        schedule: the current one.
    """

    def __init__(self, schedule: UpdateSchedule) -> None:
        self._steps: list[tuple[float, float, float]] = []
        """[(device_s, worker_s, stall_s)]."""
        self._shortest = _FIRST_OBSERVATION
        self.restart(schedule, schedule)

    def restart(self, before: UpdateSchedule, after: UpdateSchedule) -> None:
        """Begins a new observation after a change of schedule or an interruption."""
        self._length = max(self._shortest, after.update_interval)
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
        self._length = max(self._length, _SHORTEST_OBSERVATION)
        self._shortest = _SHORTEST_OBSERVATION
        load = statistics.median(worker) / max(statistics.median(device), 1e-9)
        return load, sum(stalls) / max(sum(device) + sum(stalls), 1e-9)


class LastBlocks(Protocol):
    """A rank's blocks, as far as the choice of a tail needs them."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the rank."""

    def in_order_of_arrival(self) -> Sequence[int]:
        """Blocks in the order in which the last step's gradients were complete."""

    def device_can_own(self, blocks: Set[int]) -> bool:
        """Whether the device may and can hold the whole state of these blocks."""


class ScheduleControl:
    """Observes steps, reduces observations over the ranks, and lets the policy decide.

    The ranks decide alike when and how far the tail grows. Which blocks these are is each rank's own affair: those that arrived last there,
    and none on a rank that did not wait.

    All ranks decide alike at the same steps. Used by one rank's training thread only. Never waits for the device: a reduced observation is
    read some steps later.

    Args:
        auto: the policy.
        stalls: clock of stall and of the worker's time.
        group: ranks that must agree.
        device: where observations are reduced.
        blocks: of the rank.

    Attributes:
        tail: the rank's blocks that take a lag of one step of their own where d = 0.
        largest_tail_share: share of the tail in the blocks of the rank where it is largest; known when the tail changes.
        owns_tail: whether the device owns the tail's weights, so that no forward pass sees the lag; the same on every rank.
    """

    def __init__(
        self,
        auto: SchedulePolicy,
        *,
        stalls: StallClock,
        group: dist.ProcessGroup,
        device: torch.device,
        blocks: LastBlocks,
    ) -> None:
        self._blocks = blocks
        self.tail: frozenset[int] = frozenset()
        self.largest_tail_share = 0.0
        self.owns_tail = False
        self._auto = auto
        self._stalls = stalls
        self._group = group
        self._device = device
        self._observer = ScheduleObserver(auto.schedule)
        self._sent: tuple[int, AsyncHostCopy, frozenset[int]] | None = None
        """Step at whose end the reduced observation can be read, the observation (see `_reduce`), and the tail that it speaks of."""
        self.waits = False
        """Whether a decision is overdue because the schedule was not allowed to change."""
        self._last = self._clocks()

    @property
    def schedule(self) -> UpdateSchedule:
        """The current schedule."""
        return self._auto.schedule

    @property
    def tail_share(self) -> float:
        """Share of all ranks' blocks in the tail."""
        return self._auto.tail

    @property
    def observes_next(self) -> bool:
        """Whether the next step completes an observation, so that it should measure the gradient rule."""
        return self._sent is None and self._observer.completes_next

    def state_dict(self) -> dict[str, Any]:
        """State of the policy. Excludes unfinished observations: the flush before a checkpoint interrupts them."""
        return {**self._auto.state_dict(), "tail_blocks": sorted(self.tail), "owns_tail": self.owns_tail}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._auto.load_state_dict(state)
        # Missing in checkpoints of versions without them; without memory for a tail, the policy has not taken the saved one.
        has_tail = self._auto.tail > 0
        self.tail = frozenset(state.get("tail_blocks", ()) if has_tail else ())
        self.owns_tail = has_tail and state.get("owns_tail", False)
        self._sent = None
        self.waits = False
        self.interrupt()

    def interrupt(self) -> None:
        """Discards the unfinished observation, at a synchronous step or a flush."""
        self._observer.restart(self.schedule, self.schedule)
        self._last = self._clocks()

    def end_step(
        self, step: int, plan: StepKind, *, max_interval_by_gradients: Tensor | None, may_change: bool
    ) -> Decision | None:
        """Adds a step to the observation; reduces a complete one, or reads a reduced one and decides.

        Args:
            step: number of the step.
            plan: kind of the step. One that changes columns waits for reasons of its own and is left out. In a synchronous one the worker
                computes for one gradient, as with S = 1, and its wait is not the schedule's.
            max_interval_by_gradients: 0-D on the device, the same on every rank; None if it was not measured.
            may_change: whether the schedule may change after this step; the same on every rank.

        Returns:
            A change of schedule, or None.
        """
        last, self._last = self._last, self._clocks()
        duration, stall, worker = (now - before for now, before in zip(self._last, last, strict=True))
        seen = None
        if plan.synchronous and self.schedule.update_interval > 1:
            self.interrupt()
        elif not plan.changes_columns:
            waited = 0.0 if plan.synchronous else stall
            seen = self._observer.add(device_s=max(0.0, duration - stall), worker_s=worker, stall_s=waited)
        if seen is not None and self._sent is None:
            tail = self._tail_without_wait(*seen)
            self._sent = (
                observation_step(step, self.schedule),
                self._reduce(*seen, max_interval_by_gradients, tail),
                tail,
            )
        if self._sent is None or step < self._sent[0]:
            self.waits = False
            return None
        self.waits = not may_change
        if self.waits:
            return None
        _, copy, tail = self._sent
        self._sent = None
        load, stall, interval, no_room, cannot_own, *shares = copy.read().tolist()
        share = 1.0 if no_room else statistics.fmean(shares)
        before, tail_before = self.schedule, self._auto.tail
        decision = self._auto.observe(
            Observation(load=load, stall=stall, max_interval_by_gradients=interval or None, tail=share)
        )
        if decision is not None:
            if decision.tail != tail_before:
                # A tail that began with a lag keeps it.
                self.owns_tail = not cannot_own and (self.owns_tail or tail_before == 0)
                self.tail, self.largest_tail_share = tail, max(shares)
            self._observer.restart(before, decision.schedule)
        return decision

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._stalls.device_s, self._stalls.worker_busy_s

    def _tail_without_wait(self, load: float, stall: float) -> frozenset[int]:
        """The tail with which this rank would not have waited."""
        n_blocks, order = self._blocks.n_blocks, self._blocks.in_order_of_arrival()
        if self.schedule.publish_lag > 0:
            return self.tail
        n = blocks_waited_for(load, stall, n_blocks=n_blocks, update_interval=self.schedule.update_interval)
        others = [block for block in order if block not in self.tail]
        return self.tail.union(others[max(0, len(others) - n) :])

    def _reduce(
        self, load: float, stall: float, max_interval_by_gradients: Tensor | None, tail: frozenset[int]
    ) -> AsyncHostCopy:
        """The largest of all ranks, float64: [load, stall, max_interval_by_gradients, whether the device has no room for what it would have
        to own, whether it would not own the tail, share of `tail` in the blocks of rank 0, of rank 1, ...]; an unknown interval is 0.
        """
        cannot_own = bool(tail) and not self._blocks.device_can_own(tail - self.tail)
        shares = [0.0] * dist.get_world_size(self._group)
        shares[dist.get_rank(self._group)] = len(tail) / max(1, self._blocks.n_blocks)
        numbers = [load, stall, 0.0, float(self.owns_tail and cannot_own), float(cannot_own), *shares]
        local = runtime_of(self._device).empty_on_host((len(numbers),), torch.float64)
        local.copy_(torch.tensor(numbers, dtype=torch.float64))
        values = local.to(self._device, non_blocking=True, copy=True)
        if max_interval_by_gradients is not None:
            values[2] = torch.nan_to_num(max_interval_by_gradients, nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return AsyncHostCopy(values)
