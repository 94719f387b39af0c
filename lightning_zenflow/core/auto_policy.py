"""Policy of `update_interval: auto` and `publish_lag: auto`: measure, choose the least stale schedule that hides, look again. Pure Python.

It begins with the least stale schedule of all, S = 1, d = 0 where that is allowed. Each look at measured times has one of these answers:

* *Steps wait*, in two looks in a row, and the worker's own load explains the wait: a staler schedule, the least stale one that hides. If
  steps with d = 0 wait although the work hides, the last blocks are late, which a longer window would not change: d grows.
* *The load has halved* since the present schedule was taken: a less stale one, the least stale one that hides.
* Otherwise nothing changes. A wait that the load does not explain is another process's doing, which no schedule mends.

S is a power of two: windows of S and 2 S steps then close at the same steps, and a change needs neither a pause nor more slots than
the larger S.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from lightning_zenflow.core.schedule import UpdateSchedule

LARGEST_LAG = 1
"""Largest d of `publish_lag: auto`. A larger one hides no more work; a longer window absorbs jitter as well."""

SMALL_STALL = 0.05
"""Tolerated wait, as a share of a step."""

HIDDEN, LIKELY_HIDDEN = 0.95, 0.85
"""Largest of `occupancies` that counts as hidden where it was measured, and where it is predicted: the margin of a change."""

_FALLEN = 0.5
"""A less stale schedule is taken where the load is at most this part of what it was when the present one was taken."""

_IN_BACKWARD = 0.55
"""Part of a step that hides work where d = 0 and each gradient is submitted in backward, which is some 2/3 of a step. On several ranks the
gather at its end hides nothing; where it is long, the measured waits decide.
"""


def candidates_of(update_intervals: Sequence[int], publish_lags: Sequence[int]) -> list[UpdateSchedule]:
    """All combinations of S and d, the least stale first."""
    return sorted(UpdateSchedule(update_interval=s, publish_lag=d) for s in update_intervals for d in publish_lags)


def with_changes(schedules: Sequence[UpdateSchedule]) -> list[UpdateSchedule]:
    """The schedules, and the one whose slots a change between any two of them may need.

    Windows of the longest S may still be open, and jobs of the largest d in flight, while another schedule begins (`JobQueue`).
    """
    longest = max(s.update_interval for s in schedules)
    return [UpdateSchedule(update_interval=longest, publish_lag=max(s.publish_lag for s in schedules)), *schedules]


def that_fit(
    candidates: Sequence[UpdateSchedule], fits: Callable[[Sequence[UpdateSchedule]], bool]
) -> list[UpdateSchedule]:
    """Candidates between which a run may change without running out of memory; the less stale ones are preferred.

    Args:
        candidates: S and d, the least stale first.
        fits: whether there is memory for a run that changes between these schedules; of fewer of them, whenever it is true of more.

    Returns:
        Some of the candidates, in their order. With one of them, all with a smaller S and the same d that were candidates are in it.
    """
    kept: list[UpdateSchedule] = []
    for candidate in candidates:
        if fits([*kept, candidate]):
            kept.append(candidate)
    return kept


def load_and_stall(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Worker's time / device's time, and the share of the time spent waiting, over several steps of one schedule.

    Medians, and without the step that waited longest: a single slow step (of the data loader, say) does not depend on the schedule.

    Args:
        steps: for each step the seconds of the device without waiting, of the worker's computation, and of waiting; at least two steps.
    """
    device, worker, waits = zip(*sorted(steps, key=lambda step: step[2])[:-1], strict=True)
    load = statistics.median(worker) / max(statistics.median(device), 1e-9)
    return load, sum(waits) / max(sum(device) + sum(waits), 1e-9)


def relative_cost(update_interval: int, *, tentative: bool = False) -> float:
    """Worker's time per step under S, relative to S = 1 with a lag.

    A job reads and writes master weights and moments once, and each gradient once. The coefficients are fitted to two cores near the
    limit of memory bandwidth (0.60, 0.67, 0.93 ns per parameter and job for S = 1, 2, 4); with more cores for that bandwidth, a larger S
    saves more.

    Args:
        update_interval: S.
        tentative: whether a job applies one more gradient tentatively, as with d = 0 in backward.
    """
    return (0.5 + 0.1 * (update_interval + tentative)) / (0.6 * update_interval)


def occupancies(loads: Mapping[UpdateSchedule, float], *, in_backward: bool) -> dict[UpdateSchedule, float]:
    """For each schedule the worker's time / the part of the device's time that may hide it.

    Args:
        loads: for each schedule the worker's time per step / the device's time per step without stall, the least stale first.
        in_backward: whether d = 0 submits gradients in backward. Otherwise it submits all of them at the end of the step, and the worker's
            whole time is stall.
    """
    without_lag = _IN_BACKWARD if in_backward else SMALL_STALL
    return {s: load / (1.0 if s.publish_lag > 0 else without_lag) for s, load in loads.items()}


def first_schedule(candidates: Sequence[UpdateSchedule], *, hides_in_backward: bool) -> UpdateSchedule:
    """The schedule that `auto` begins with: the least stale one that can hide at all.

    Args:
        candidates: S and d to choose from, the least stale first.
        hides_in_backward: whether d = 0 submits gradients in backward.
    """
    may_hide = (c for c in candidates if hides_in_backward or c.publish_lag > 0)
    return next(may_hide, candidates[0])


class SchedulePolicy:
    """Chooses a schedule by observations. Deterministic, so that ranks with equal observations agree.

    Args:
        candidates: S and d to choose from, the least stale first; with one, those of a smaller S, a power of two, and the same d as well.
        hides_in_backward: whether d = 0 submits gradients in backward.

    Attributes:
        schedule: the current one.
    """

    def __init__(self, candidates: Sequence[UpdateSchedule], *, hides_in_backward: bool = False) -> None:
        self._candidates = list(candidates)
        self._in_backward = hides_in_backward
        self.schedule = first_schedule(self._candidates, hides_in_backward=hides_in_backward)
        self._waited = False  # in the last look
        self._taken_at = math.inf
        """The load of S = 1 with a lag at which the present schedule was taken because steps waited."""

    def observe(self, load: float, stall: float) -> str | None:
        """Looks at measurements of the slowest rank, the same numbers on every rank, and changes `schedule` where that is due.

        Args:
            load: worker's time per step / device's time per step without stall.
            stall: share of the time spent waiting for the worker.

        Returns:
            Reason of the change, for the log; None if there is none.
        """
        present = self.schedule
        of_one = load / self._cost(present)
        loads = {c: of_one * self._cost(c) for c in self._candidates}
        occupied = occupancies(loads, in_backward=self._in_backward)
        hides = occupied[present] <= HIDDEN
        # Without a lag the last blocks are exposed even where the work hides.
        explained = stall <= load if present.publish_lag == 0 else not hides
        waited_before, self._waited = self._waited, stall > SMALL_STALL and explained
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
            return f"{stall:.1%} of the time is spent waiting, and the worker needs {load:.2f} of a step"
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

    def _cost(self, schedule: UpdateSchedule) -> float:
        return relative_cost(schedule.update_interval, tentative=self._in_backward and schedule.publish_lag == 0)
