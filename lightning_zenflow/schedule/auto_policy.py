"""`update_interval: auto` and `publish_lag: auto`: which S and d the next steps use. Pure Python, so that it can be simulated.

The least stale schedule is wanted whose work on the host hides behind the device's. Three things decide:

* *hiding*: the worker's time a step over the device's, measured; for another S it is scaled by what a round of S steps costs.
* *the gradient rule* (Zen-auto; ZenFlow, arXiv 2505.12242, section 3.3; `auto_ratio`): a window should close before the gradient deferred
  in it outgrows the gradient that is applied at once. It bounds S from above, but not below 4: up to there deferring costs no
  accuracy (docs/convergence.md).
* *calm*: a schedule that stalls is left at once; a less stale one is taken only after it has looked safe for a while, longer each
  time that this turned out to be wrong.

S is a power of two: windows of S and 2 S steps then close at the same steps, so a change needs no pause and no more slots than the
larger S.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zenflow.schedule.staggered import UpdateSchedule

LARGEST_LAG = 2
"""`publish_lag: auto` never goes beyond: more hides no more work, it only evens out more jitter."""

_SMALLEST_BOUND = 4

_STRIKES = 2
"""Observations with too much waiting before something is done about it."""

_PATIENCE, _LONGEST_PATIENCE = 2, 64
"""Observations that must agree before a less stale schedule is taken."""

_PROBATION = 16
"""Observations within which leaving a less stale schedule again means that taking it was wrong."""

_BOUND_SLACK = 1.25

_SMALL_STALL = 0.02
"""Share of a step that may be spent waiting."""


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Up to which share of the device's time the worker's time counts as hidden."""

    with_lag: float
    in_backward: float
    """S = 1, d = 0, each gradient handed over as it arrives: backward is some 2/3 of a step."""
    at_the_end: float
    """No lag, everything handed over at the end of the step: the worker's whole time is waiting."""


_STAY = _Limits(with_lag=0.95, in_backward=0.55, at_the_end=_SMALL_STALL)

_TURN_TO = _Limits(with_lag=0.85, in_backward=0.45, at_the_end=0.01)

_GO_BACK_TO = _Limits(with_lag=0.75, in_backward=0.4, at_the_end=0.01)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a number of steps under the present schedule looked like, on the worst rank; the same numbers on every rank."""

    load: float
    """Worker's time a step / device's time a step without waiting."""
    stall: float
    """Share of the time that was spent waiting for the worker."""
    max_interval_by_gradients: float | None = None
    """How many steps' deferred gradient equals the gradient that is applied at once (`selection.max_interval_by_gradients`); None: not known."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of schedule."""

    schedule: UpdateSchedule
    reason: str


def largest_power_of_two(limit: float) -> int:
    """The largest power of two that is not above `limit`; at least 1."""
    return 1 << max(0, int(math.log2(limit)) if limit >= 1 else 0)


def relative_cost(update_interval: int) -> float:
    """What the worker needs a step under S, relative to S = 1.

    A round reads and writes master and moments once, and each gradient once. The weights are those of two cores whose memory is soon the
    limit (0.60, 0.67, 0.93 ns a parameter and round for S = 1, 2, 4); where there is more of it, a larger S saves more than this.
    """
    return (0.5 + 0.1 * update_interval) / (0.6 * update_interval)


def observation_step(step: int, schedule: UpdateSchedule) -> int:
    """The step at whose end an observation can be read that was exchanged at the end of `step`.

    Without waiting: what is published then was handed over after `step`, so that the device had the exchange behind it by then.
    """
    return step + schedule.publish_lag + 1


class SchedulePolicy:
    """Decides on the schedule by what was observed; the same on every rank, since the observations are.

    Args:
        update_intervals: S to choose from, ascending powers of two; or one, if it is not "auto".
        publish_lags: d to choose from, ascending; or one, if it is not "auto".
        hides_in_backward: whether S = 1, d = 0 hands gradients over in backward.
    """

    def __init__(
        self, update_intervals: Sequence[int], publish_lags: Sequence[int], *, hides_in_backward: bool = False
    ) -> None:
        self._hides_in_backward = hides_in_backward
        self._schedules = [
            UpdateSchedule(update_interval=s, publish_lag=d) for s in update_intervals for d in publish_lags
        ]
        self.schedule = UpdateSchedule(
            update_interval=max(s for s in update_intervals if s <= max(_SMALLEST_BOUND, update_intervals[0])),
            publish_lag=min(publish_lags, key=lambda d: abs(d - 1)),
        )
        """In force."""
        self._max_interval_by_gradients: float | None = None
        self._strikes = 0
        self._calm = 0
        self._patience = _PATIENCE
        self._probation = 0

    def observe(self, observation: Observation) -> Decision | None:
        """Takes what the steps since the last observation looked like, and decides; None: the schedule stays."""
        if observation.max_interval_by_gradients is not None:
            known = (
                observation.max_interval_by_gradients
                if self._max_interval_by_gradients is None
                else self._max_interval_by_gradients
            )
            self._max_interval_by_gradients = 0.5 * (known + observation.max_interval_by_gradients)
        if self._probation > 0:
            self._probation -= 1
            if self._probation == 0:
                self._patience = max(self._patience // 2, _PATIENCE)
        decision = self._decide(observation, [p for p in self._schedules if p.update_interval <= self._bound()])
        if decision is not None:
            self._probation = _PROBATION if decision.schedule < self.schedule else 0
            self._strikes = self._calm = 0
            self.schedule = decision.schedule
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The schedule and what it was decided by, as plain numbers."""
        return {
            "update_interval": self.schedule.update_interval,
            "publish_lag": self.schedule.publish_lag,
            "max_interval_by_gradients": self._max_interval_by_gradients,
            "strikes": self._strikes,
            "calm": self._calm,
            "patience": self._patience,
            "probation": self._probation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; a schedule that is not among those to choose from is not taken."""
        schedule = UpdateSchedule(update_interval=state["update_interval"], publish_lag=state["publish_lag"])
        if schedule not in self._schedules:
            return
        self.schedule, self._max_interval_by_gradients = schedule, state["max_interval_by_gradients"]
        self._strikes, self._calm = state["strikes"], state["calm"]
        self._patience, self._probation = state["patience"], state["probation"]

    def _bound(self) -> float:
        """Largest S that the gradient rule allows. The present S may stay a little above it, so that noise does not move it."""
        if self._max_interval_by_gradients is None:
            return math.inf
        present = self.schedule.update_interval
        stays = self._max_interval_by_gradients * _BOUND_SLACK >= present
        bound = (
            present
            if stays and self._max_interval_by_gradients < 2 * present
            else largest_power_of_two(self._max_interval_by_gradients)
        )
        return max(_SMALLEST_BOUND, bound, self._schedules[0].update_interval)

    def _decide(self, observation: Observation, allowed: Sequence[UpdateSchedule]) -> Decision | None:
        load, stall = observation.load, observation.stall
        if self.schedule not in allowed:
            lag = self.schedule.publish_lag
            longest = next(p for p in reversed(allowed) if p.publish_lag == lag)
            return Decision(
                schedule=longest, reason=f"the gradient rule allows windows of {self._bound():g} steps at most"
            )
        schedule: UpdateSchedule | None = None
        if load > self._limit(self.schedule, _STAY):
            schedule = self._relief(load, allowed)
            reason = f"the worker needs {load:.2f} of a step"
        elif stall > _SMALL_STALL and self._strikes + 1 >= _STRIKES:
            schedule = next((p for p in allowed if p > self.schedule), None)
            reason = f"{stall:.1%} of the time is spent waiting"
        else:
            self._strikes = self._strikes + 1 if stall > _SMALL_STALL else 0
            if stall <= _SMALL_STALL:
                schedule = self._less_stale(load, allowed)
            reason = f"the worker needs {load:.2f} of a step only"
        if schedule is None:
            return None
        if schedule > self.schedule and self._probation > 0:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        return Decision(schedule=schedule, reason=reason)

    def _relief(self, load: float, allowed: Sequence[UpdateSchedule]) -> UpdateSchedule | None:
        """The least stale schedule under which the worker's time hides, or else the one that costs it least."""
        staler = [p for p in allowed if p > self.schedule]
        for schedule in staler:
            if self._scaled(load, schedule) <= self._limit(schedule, _TURN_TO):
                return schedule
        # A longer lag alone gives the worker no more time.
        longer = [
            p for p in staler if p.update_interval > self.schedule.update_interval or self.schedule.publish_lag == 0
        ]
        if not longer:
            return None
        longest = [p for p in longer if p.update_interval == longer[-1].update_interval]
        return next((p for p in longest if p.publish_lag > 0), longest[-1])

    def _less_stale(self, load: float, allowed: Sequence[UpdateSchedule]) -> UpdateSchedule | None:
        """The least stale schedule that would surely hide, once it has looked so often enough."""
        sure = [p for p in allowed if p < self.schedule and self._scaled(load, p) <= self._limit(p, _GO_BACK_TO)]
        self._calm = self._calm + 1 if sure else 0
        return sure[0] if self._calm >= self._patience else None

    def _scaled(self, load: float, schedule: UpdateSchedule) -> float:
        return load * relative_cost(schedule.update_interval) / relative_cost(self.schedule.update_interval)

    def _limit(self, schedule: UpdateSchedule, limits: _Limits) -> float:
        """The largest load under which a schedule counts as hidden."""
        if schedule.publish_lag > 0:
            return limits.with_lag
        return limits.in_backward if self._hides_in_backward and schedule.update_interval == 1 else limits.at_the_end
