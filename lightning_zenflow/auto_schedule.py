"""`update_interval: auto` and `publish_lag: auto`: which S and d the next steps use. Pure Python, so that it can be simulated.

The least stale schedule is wanted whose work on the host hides behind the device's. Three things decide:

* *hiding*: the worker's time a step over the device's, measured; for another S it is scaled by what a round of S steps costs.
* *the gradient rule* (Zen-auto; ZenFlow, arXiv 2505.12242, section 3.3; `auto_ratio`): a window should close before the gradient deferred
  in it outgrows the gradient that is applied at once. It bounds S from above, but not below 4: up to there deferring costs no
  accuracy (docs/convergence.md).
* *calm*: a schedule that stalls is left at once; a less stale one is taken only after it has looked safe for a while, longer each
  time that this turned out to be wrong.

S is a power of two: windows of S and 2 S steps then close at the same steps, so a change needs no pause and no more pages than the
larger S.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST_LAG = 2
"""`publish_lag: auto` never goes beyond: more hides no more work, it only evens out more jitter."""

_SMALLEST_BOUND = 4
_STRIKES = 2
"""Observations with too much waiting before something is done about it."""
_PATIENCE, _LONGEST_PATIENCE = 2, 64
"""Observations that must agree before a less stale pace is taken."""
_PROBATION = 16
"""Observations within which leaving a less stale pace again means that taking it was wrong."""
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


@dataclass(frozen=True, kw_only=True, order=True)
class Pace:
    """A schedule's two numbers; ordered by staleness."""

    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a number of steps under the present pace looked like, on the worst rank; the same numbers on every rank."""

    load: float
    """Worker's time a step / device's time a step without waiting."""
    stall: float
    """Share of the time that was spent waiting for the worker."""
    deferral: float | None = None
    """How many steps' deferred gradient equals the gradient that is applied at once (`selection.deferral`); None: not known."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of pace."""

    pace: Pace
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


def observation_step(step: int, pace: Pace) -> int:
    """The step at whose end an observation can be read that was exchanged at the end of `step`.

    Without waiting: what is published then was handed over after `step`, so that the device had the exchange behind it by then.
    """
    return step + pace.publish_lag + 1


class AutoSchedule:
    """Decides on the pace by what was observed; the same on every rank, since the observations are.

    Args:
        update_intervals: S to choose from, ascending powers of two; or one, if it is not "auto".
        publish_lags: d to choose from, ascending; or one, if it is not "auto".
        hides_in_backward: whether S = 1, d = 0 hands gradients over in backward.
    """

    def __init__(
        self, update_intervals: Sequence[int], publish_lags: Sequence[int], *, hides_in_backward: bool = False
    ) -> None:
        self._hides_in_backward = hides_in_backward
        self._paces = [Pace(update_interval=s, publish_lag=d) for s in update_intervals for d in publish_lags]
        self.pace = Pace(
            update_interval=max(s for s in update_intervals if s <= max(_SMALLEST_BOUND, update_intervals[0])),
            publish_lag=min(publish_lags, key=lambda d: abs(d - 1)),
        )
        """In force."""
        self._deferral: float | None = None
        self._strikes = 0
        self._calm = 0
        self._patience = _PATIENCE
        self._probation = 0

    def observe(self, observation: Observation) -> Decision | None:
        """Takes what the steps since the last observation looked like, and decides; None: the pace stays."""
        if observation.deferral is not None:
            known = observation.deferral if self._deferral is None else self._deferral
            self._deferral = 0.5 * (known + observation.deferral)
        if self._probation > 0:
            self._probation -= 1
            if self._probation == 0:
                self._patience = max(self._patience // 2, _PATIENCE)
        decision = self._decide(observation, [p for p in self._paces if p.update_interval <= self._bound()])
        if decision is not None:
            self._probation = _PROBATION if decision.pace < self.pace else 0
            self._strikes = self._calm = 0
            self.pace = decision.pace
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The pace and what it was decided by, as plain numbers."""
        return {
            "update_interval": self.pace.update_interval,
            "publish_lag": self.pace.publish_lag,
            "deferral": self._deferral,
            "strikes": self._strikes,
            "calm": self._calm,
            "patience": self._patience,
            "probation": self._probation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; a pace that is not among those to choose from is not taken."""
        pace = Pace(update_interval=state["update_interval"], publish_lag=state["publish_lag"])
        if pace not in self._paces:
            return
        self.pace, self._deferral = pace, state["deferral"]
        self._strikes, self._calm = state["strikes"], state["calm"]
        self._patience, self._probation = state["patience"], state["probation"]

    def _bound(self) -> float:
        """Largest S that the gradient rule allows. The present S may stay a little above it, so that noise does not move it."""
        if self._deferral is None:
            return math.inf
        present = self.pace.update_interval
        stays = self._deferral * _BOUND_SLACK >= present
        bound = present if stays and self._deferral < 2 * present else largest_power_of_two(self._deferral)
        return max(_SMALLEST_BOUND, bound, self._paces[0].update_interval)

    def _decide(self, observation: Observation, allowed: Sequence[Pace]) -> Decision | None:
        load, stall = observation.load, observation.stall
        if self.pace not in allowed:
            lag = self.pace.publish_lag
            longest = next(p for p in reversed(allowed) if p.publish_lag == lag)
            return Decision(pace=longest, reason=f"the gradient rule allows windows of {self._bound():g} steps at most")
        pace: Pace | None = None
        if load > self._limit(self.pace, _STAY):
            pace = self._relief(load, allowed)
            reason = f"the worker needs {load:.2f} of a step"
        elif stall > _SMALL_STALL and self._strikes + 1 >= _STRIKES:
            pace = next((p for p in allowed if p > self.pace), None)
            reason = f"{stall:.1%} of the time is spent waiting"
        else:
            self._strikes = self._strikes + 1 if stall > _SMALL_STALL else 0
            if stall <= _SMALL_STALL:
                pace = self._less_stale(load, allowed)
            reason = f"the worker needs {load:.2f} of a step only"
        if pace is None:
            return None
        if pace > self.pace and self._probation > 0:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        return Decision(pace=pace, reason=reason)

    def _relief(self, load: float, allowed: Sequence[Pace]) -> Pace | None:
        """The least stale pace under which the worker's time hides, or else the one that costs it least."""
        staler = [p for p in allowed if p > self.pace]
        for pace in staler:
            if self._scaled(load, pace) <= self._limit(pace, _TURN_TO):
                return pace
        # A longer lag alone gives the worker no more time.
        longer = [p for p in staler if p.update_interval > self.pace.update_interval or self.pace.publish_lag == 0]
        if not longer:
            return None
        longest = [p for p in longer if p.update_interval == longer[-1].update_interval]
        return next((p for p in longest if p.publish_lag > 0), longest[-1])

    def _less_stale(self, load: float, allowed: Sequence[Pace]) -> Pace | None:
        """The least stale pace that would surely hide, once it has looked so often enough."""
        sure = [p for p in allowed if p < self.pace and self._scaled(load, p) <= self._limit(p, _GO_BACK_TO)]
        self._calm = self._calm + 1 if sure else 0
        return sure[0] if self._calm >= self._patience else None

    def _scaled(self, load: float, pace: Pace) -> float:
        return load * relative_cost(pace.update_interval) / relative_cost(self.pace.update_interval)

    def _limit(self, pace: Pace, limits: _Limits) -> float:
        """The largest load under which a pace counts as hidden."""
        if pace.publish_lag > 0:
            return limits.with_lag
        return limits.in_backward if self._hides_in_backward and pace.update_interval == 1 else limits.at_the_end
