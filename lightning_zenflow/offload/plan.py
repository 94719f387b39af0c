"""Plans of the steps: synchronous or asynchronous, selecting columns, changing the schedule. The automatic choice of the schedule
(`update_interval: auto`, `publish_lag: auto`): measure, choose the least stale one that hides, look again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.core.schedule import UpdateSchedule
from lightning_zenflow.offload.columns import Selector
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import RankState, StepContext, StepInputs

SMALL_STALL = 0.05
"""Tolerated wait, as a share of a step."""

HIDDEN, LIKELY_HIDDEN = 0.95, 0.85
"""Largest share of the time that may hide the worker's which counts as hidden where it was measured, and where it is predicted."""

_FALLEN = 0.5
"""A less stale schedule is taken where the load is at most this part of what it was when the present one was taken."""

_HIDES = {0: 0.55, 1: 1.0}
"""Part of a step that hides work, by d. With 0 each gradient is submitted in backward, which is some 2/3 of a step. On several ranks the
gather at its end hides nothing; where it is long, the measured waits decide."""


def load_and_stall(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Worker's time / device's time, and the share of the time spent waiting, over steps of one schedule, at least two: for each the
    seconds of the device without waiting, of the worker's computation, and of waiting. Medians, and without the step that waited longest: a
    single slow step, of the data loader say, does not depend on the schedule.
    """
    device, worker, waits = zip(*sorted(steps, key=lambda step: step[2])[:-1], strict=True)
    load = median(worker) / max(median(device), 1e-9)
    return load, sum(waits) / max(sum(device) + sum(waits), 1e-9)


def relative_cost(schedule: UpdateSchedule) -> float:
    """Worker's time per step, relative to S = 1 with a lag; with d = 0 a job applies one more gradient, tentatively.

    The coefficients are fitted to two cores near the limit of memory bandwidth (0.60, 0.67, 0.93 ns per parameter and job for S = 1, 2, 4);
    with more cores for that bandwidth, a larger S saves more.
    """
    s = schedule.update_interval
    return (0.5 + 0.1 * (s + (schedule.publish_lag == 0))) / (0.6 * s)


def hiding_share(load: float, publish_lag: int, share: float) -> float:
    """Share of resident blocks beside which the rest of the worker's work likely hides, where `load` is that of the rest beside `share`."""
    return 1 - (1 - share) * LIKELY_HIDDEN * _HIDES[publish_lag] / load


class SchedulePolicy:
    """Chooses a schedule and owners by observations; ranks with equal ones agree. `schedule` is the current one, at first the first of the
    `candidates`, which are ordered by staleness; `resident_share` the share of the blocks that all devices are to own.

    Each look at measured times has one of these answers:

    * *Steps wait*, and the worker's own load explains the wait: the device takes blocks, which makes nothing late, as many as let the rest
      hide, at least half of them; as far as all devices have room. At that limit, and in the second look in a row: a staler schedule, the
      least stale one that hides. If steps with d = 0 wait although the work hides, the last blocks are late, which a longer window would
      not change: d grows.
    * *The load has halved* since the present schedule was taken: a less stale one, the least stale one that hides.
    * Otherwise nothing changes: no schedule mends a wait that another process causes.

    S is a power of two: windows of S and 2 S steps then close at the same steps, and a change needs neither a pause nor more slots than
    the larger S.
    """

    def __init__(self, candidates: Sequence[UpdateSchedule]) -> None:
        self._candidates = list(candidates)
        self.schedule = self._candidates[0]
        self.resident_share = 0.0
        self._waited = False  # in the last look
        self._taken_at = math.inf
        """The load of S = 1 with a lag at which the present schedule was taken because steps waited."""

    def observe(self, load: float, stall: float, *, share: float = 0.0, room: float = 0.0) -> str | None:
        """Looks at `load_and_stall` of the slowest rank, at the smallest share of resident blocks, and at the largest that each device has
        room for. Returns the reason of a change of `schedule` or of a larger `resident_share`, for the log; None: no change.
        """
        self.resident_share = share
        present = self.schedule
        of_one = load / relative_cost(present)
        # For each schedule the worker's time / the part of the device's time that may hide it.
        occupied = {c: of_one * relative_cost(c) / _HIDES[c.publish_lag] for c in self._candidates}
        hides = occupied[present] <= HIDDEN
        # Without a lag the last blocks are exposed even where the work hides.
        explained = stall <= load if present.publish_lag == 0 else not hides
        waited_before, self._waited = self._waited, stall > SMALL_STALL and explained
        reason = f"{stall:.1%} of the time is spent waiting, and the worker needs {load:.2f} of a step"
        if self._waited and room > share:
            self._waited = False
            # The formula does not know all waits, as for an embedding that arrives last: half of the rest in any case.
            self.resident_share = min(max(hiding_share(load, present.publish_lag, share), (1 + share) / 2), room)
            return reason
        if self._waited and waited_before:
            self._waited = False
            staler = [c for c in self._candidates if c > present and occupied[c] < occupied[present]]
            if present.publish_lag == 0 and hides:
                staler = [c for c in staler if c.publish_lag > 0]
            if not staler:
                return None
            # If there is none that likely hides, the one that comes nearest to it.
            nearest = min(staler, key=occupied.__getitem__)
            self.schedule = next((c for c in staler if occupied[c] <= LIKELY_HIDDEN), nearest)
            self._taken_at = of_one
            return reason
        if not self._waited and of_one <= _FALLEN * self._taken_at:
            for c in self._candidates:
                if c < present and occupied[c] <= LIKELY_HIDDEN:
                    self.schedule = c
                    return f"the worker needs {load:.2f} of a step only"
        return None

    def restore(self, schedule: UpdateSchedule) -> None:
        """Continues a run; ignores a schedule that is not a candidate. Past looks are forgotten."""
        if schedule in self._candidates:
            self.schedule = schedule
            self._waited, self._taken_at = False, math.inf


_LOOK = 16
"""Steps that are measured before a look, at least S of them."""


class ScheduleControl:
    """Measures steps, reduces what it measured over the ranks, lets the policy decide, and measures again; on all ranks in the same steps.

    Not measured are the first steps, which compile and touch memory, the steps right after a decision, whose windows may still have the
    old length, and the steps around an interruption such as a validation. Never waits for the device: reduced numbers are read some steps
    later. `policy` has the current schedule and share of resident blocks.
    """

    def __init__(self, policy: SchedulePolicy, rank: RankState, shares: Callable[[], tuple[float, float]]) -> None:
        """`shares` has the share of the blocks that is resident on this rank, and the largest that its device has room for."""
        self.policy = policy
        self._rank = rank
        self._shares = shares
        self._steps: list[tuple[float, float, float]] = []  # see `load_and_stall`
        # The step at whose end the reduced numbers can be read, and these numbers (see `_reduce`).
        self._sent: tuple[int, AsyncHostCopy] | None = None
        self.interrupt()

    def restore(self, schedule: UpdateSchedule) -> None:
        """As `SchedulePolicy.restore`."""
        self.policy.restore(schedule)
        self._sent = None
        self._steps.clear()
        self.interrupt()

    def interrupt(self, longest: int = 0) -> None:
        """Leaves out the next steps, after a synchronous step, a flush, or a look. Open windows have at most `longest` steps, or S."""
        s, d = self.policy.schedule.update_interval, self.policy.schedule.publish_lag
        # One step more: the time of the first step after an interruption includes the interruption.
        self._left_out = 1 + max(s, longest) + d
        self._last = self._clocks()

    def end_step(self, context: StepContext) -> str | None:
        """Measures a step; reduces when they are enough, or reads what was reduced and decides. Returns the reason of a change.

        A step that changes columns waits for reasons of its own and is left out. In another synchronous one the worker computes for one
        gradient, as with S = 1, and its wait is not the schedule's.
        """
        step, last, self._last = context.number, self._last, self._clocks()
        duration, waited, worker = (now - before for now, before in zip(self._last, last, strict=True))
        s, d = self.policy.schedule.update_interval, self.policy.schedule.publish_lag
        if context.column_norms is None and not context.releases:
            if context.synchronous and s > 1:
                self.interrupt()
            elif self._left_out:
                self._left_out -= 1
            elif self._sent is None:
                self._steps.append((max(0.0, duration - waited), worker, 0.0 if context.synchronous else waited))
        if self._sent is None and len(self._steps) == max(_LOOK, s):
            # The jobs published at that step are submitted after this one, so the device has finished the reduction before.
            share, room = self._shares()
            self._sent = step + d + 1, self._reduce(*load_and_stall(self._steps), -share, -room)
        if self._sent is None or step < self._sent[0]:
            return None
        load, stall, share, room = self._sent[1].read().tolist()
        self._sent = None
        self._steps.clear()
        reason = self.policy.observe(load, stall, share=-share, room=-room)
        self.interrupt(longest=s)
        return reason

    def _clocks(self) -> tuple[float, float, float]:
        telemetry = self._rank.telemetry
        return time.perf_counter(), sum(telemetry.device_seconds.values()), telemetry.counts.worker_busy_s

    def _reduce(self, *numbers: float) -> AsyncHostCopy:
        """The largest of all ranks, float64."""
        local = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        runtime = runtime_of(self._rank.device)
        # From page-locked memory, so that the host does not wait for the copy.
        values = runtime.empty_on_host(local.shape, local.dtype).copy_(local).to(runtime.device, non_blocking=True)
        if self._rank.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._rank.group)
        return AsyncHostCopy(values)


class Planner:
    """Plans the steps, alike on every rank. The device's columns change in synchronous steps, behind which the arena is exact. `control` is
    None if S and d are given.
    """

    def __init__(
        self, config: ZenFlowConfig, jobs: JobQueue, control: ScheduleControl | None, selector: Selector
    ) -> None:
        self._config = config
        self._jobs = jobs
        self.control = control
        self._selector = selector
        self._synchronous_until = 0

    def start_over(self, step: int, count: int, *, shows_exact: bool = False) -> None:
        """Behind `step`, after `count` applied steps: forgets the selection; makes the rest of the warm-up synchronous, in whose last step
        columns are selected where some are wanted. With `shows_exact` the model must show exact weights behind the next step.
        """
        self._selector.start_over()
        is_late = shows_exact and not self._jobs.schedule.is_immediate
        self._synchronous_until = step + max(is_late, self._config.full_warm_up_rounds - count)

    def state_dict(self) -> dict[str, Any]:
        """What later plans depend on."""
        return {
            "synchronous_until": self._synchronous_until,
            "selector": self._selector.state_dict(),
            "schedule": None if self.control is None else asdict(self.control.policy.schedule),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; sets the schedule of the jobs as well."""
        self._synchronous_until = state["synchronous_until"]
        self._selector.load_state_dict(state["selector"])
        if self.control is not None and state["schedule"] is not None:
            self.control.restore(UpdateSchedule(**state["schedule"]))
        self.apply_schedule()

    def plan(self, step: int, inputs: StepInputs) -> StepContext:
        """Plan of the next step."""
        schedule = self._jobs.schedule
        # Where some weights are late, the device gains by updating others at once.
        wants_columns = self._config.owned_ratio > 0 and not schedule.is_immediate
        may_change = step >= self._synchronous_until
        selects = may_change and wants_columns and self._selector.is_due(step)
        releases = may_change and not wants_columns and self._selector.owned is not None
        synchronous = step <= self._synchronous_until or selects or releases
        return StepContext(
            number=step,
            inputs=inputs,
            schedule=schedule,
            synchronous=synchronous,
            submits_in_backward=self._config.submits_in_backward and schedule.publish_lag == 0 and not synchronous,
            column_norms=self._selector.new_column_norms() if selects else None,
            releases=releases,
        )

    def apply_schedule(self) -> None:
        """Gives the jobs the schedule that was decided on last; also after an exception has interrupted that, right after a flush."""
        if self.control is not None:
            self._jobs.set_schedule(self.control.policy.schedule)

    def end_step(self, context: StepContext) -> float | None:
        """Changes the schedule where that is due behind a step, and logs the change; with a `control`. Returns the share of the blocks that
        the device is to own, behind a flush on all ranks; None: nothing changes.
        """
        assert self.control is not None
        policy = self.control.policy
        before = policy.schedule
        if (reason := self.control.end_step(context)) is None:
            return None
        now, share = policy.schedule, policy.resident_share
        if now == before:
            rank_zero_info(f"ZenFlow: after step {context.number} offload_ratio={1 - share:.2f}: {reason}")
            return share
        self.apply_schedule()
        change = f"update_interval={now.update_interval}, publish_lag={now.publish_lag}"
        change += f" (before: {before.update_interval}, {before.publish_lag})"
        rank_zero_info(f"ZenFlow: after step {context.number} {change}: {reason}")
        return None
