"""`update_interval: auto`, `publish_lag: auto` and the tail in training: measurements, and agreement of the ranks on the next schedule."""

import logging
import statistics
import time
from collections.abc import Mapping, Set
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy, has_room, runtime_of
from lightning_zenflow.core.partition import STATE_BYTES
from lightning_zenflow.schedule.auto_policy import SchedulePolicy, blocks_waited_for, load_and_stall
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.step.arrivals import Arrivals
from lightning_zenflow.step.context import StepPlan
from lightning_zenflow.worker.rank_state import RankState

_log = logging.getLogger(__name__)

_LOOK = 16
"""Steps that are measured before a look, at least S of them."""


class ScheduleControl:
    """Measures steps, reduces what it measured over the ranks, lets the policy decide, and measures again.

    All ranks decide alike at the same steps, also on when and how far the tail grows. Which blocks these are is each rank's own affair:
    those that arrived last there, and none on a rank that did not wait.

    Not measured are the first steps, which compile and touch memory, the steps right after a decision, whose windows may still have the
    old length, and the steps around an interruption such as a validation. Used by one rank's training thread only. Never waits for the
    device: reduced numbers are read some steps later.

    Args:
        auto: the policy.
        rank: its clocks are read.
        arrivals: the last blocks of a step.
        group: ranks that must agree.

    Attributes:
        tail: the rank's blocks that the device owns from their next window on, because they arrive last.
    """

    def __init__(
        self,
        auto: SchedulePolicy,
        config: ZenFlowConfig,
        rank: RankState,
        arrivals: Arrivals,
        *,
        group: dist.ProcessGroup,
    ) -> None:
        self._auto = auto
        self._tail_needs_room = config.tail != "device"
        self._rank = rank
        self._arrivals = arrivals
        self._group = group
        self.tail: frozenset[int] = frozenset()
        self._steps: list[tuple[float, float, float]] = []  # see `load_and_stall`
        self._sent: tuple[int, AsyncHostCopy, frozenset[int]] | None = None
        """Step at whose end the reduced numbers can be read, these numbers (see `_reduce`), and the tail that they speak of."""
        self.interrupt()

    @property
    def schedule(self) -> UpdateSchedule:
        """The current schedule."""
        return self._auto.schedule

    def state_dict(self) -> dict[str, Any]:
        """Schedule and tail, as plain numbers. Excludes measured steps."""
        return {**asdict(self.schedule), "tail": self._auto.tail, "tail_blocks": sorted(self.tail)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, without a tail that the device has no room for."""
        schedule = UpdateSchedule(update_interval=state["update_interval"], publish_lag=state["publish_lag"])
        self._auto.restore(schedule, state["tail"])
        tail = frozenset(state["tail_blocks"] if self._auto.tail > 0 else ())
        self.tail = tail if self._can_own(tail) else frozenset()
        if self.tail != tail:
            _log.warning(
                "ZenFlow: the device has no room for %d blocks that it owned: the worker updates them", len(tail)
            )
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
            Reason of a change of `schedule`, or if that is the same, of a longer tail; None if nothing changes.
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
            tail = self._tail_without_wait(load, stall)
            # The jobs published at that step are submitted after this one, so the device has finished the reduction before.
            readable = step + self.schedule.publish_lag + 1
            self._sent = readable, self._reduce(load, stall, tail), tail
        if self._sent is None or step < self._sent[0] or not may_change:
            return None
        return self._decide(*self._sent[1:])

    def _decide(self, reduced: AsyncHostCopy, tail: frozenset[int]) -> str | None:
        self._sent = None
        self._steps.clear()
        load, stall, no_room, *shares = reduced.read().tolist()
        share = 1.0 if no_room else statistics.fmean(shares)
        longest, tail_before = self.schedule.update_interval, self._auto.tail
        reason = self._auto.observe(load, stall, tail=share)
        if self._auto.tail != tail_before:
            self.tail = tail
        self.interrupt(longest)
        return reason

    def _clocks(self) -> tuple[float, float, float]:
        stalls = self._rank.telemetry.stalls
        return time.perf_counter(), stalls.device_s, stalls.worker_busy_s

    def _tail_without_wait(self, load: float, stall: float) -> frozenset[int]:
        """The tail with which this rank would not have waited."""
        if self.schedule.publish_lag > 0:
            return self.tail
        n = blocks_waited_for(
            load, stall, n_blocks=len(self._rank.partition.blocks), update_interval=self.schedule.update_interval
        )
        others = [block for block in self._arrivals.in_order if block not in self.tail]
        return self.tail.union(others[max(0, len(others) - n) :])

    def _can_own(self, blocks: Set[int]) -> bool:
        """Whether the device may and can hold the whole state of these blocks; right after a step or a flush."""
        if not (blocks and self._tail_needs_room):
            return True
        of_blocks = (self._rank.partition.blocks[block] for block in blocks)
        numel = sum(block.end - block.begin for block in of_blocks)
        # The state, and the gradient in the model's type.
        return has_room(numel * (STATE_BYTES + self._rank.dtype.itemsize), self._rank.device)

    def _reduce(self, load: float, stall: float, tail: frozenset[int]) -> AsyncHostCopy:
        """The largest of all ranks, float64: [load, stall, whether the device has no room for the tail, share of the tail in the blocks of
        rank 0, of rank 1, ...].
        """
        shares = [0.0] * dist.get_world_size(self._group)
        shares[dist.get_rank(self._group)] = len(tail) / max(1, len(self._rank.partition.blocks))
        numbers = [load, stall, float(not self._can_own(tail - self.tail)), *shares]
        local = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        runtime = runtime_of(self._rank.device)
        # From page-locked memory, so that the host does not wait for the copy.
        values = runtime.to_device(runtime.empty_on_host(local.shape, local.dtype).copy_(local))
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return AsyncHostCopy(values)
