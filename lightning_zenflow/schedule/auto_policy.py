"""Policy of `update_interval: auto` and `publish_lag: auto`. Pure Python, so that it can be simulated.

Chooses the least stale schedule (see the order of `UpdateSchedule`) under which the worker's time hides behind the device's, by four
rules. It begins with the least stale one of all, S = 1, d = 0 where that is allowed, and turns where the first short observation says.

* *Hiding*: the measured ratio of the worker's time per step to the device's, scaled by `relative_cost` for other S.
* *Gradient rule* (Zen-auto; ZenFlow, arXiv 2505.12242, section 3.3; `auto_ratio`): a window closes before the gradient deferred in it
  exceeds the gradient applied at once. This bounds S from above, but not below 4: up to S = 4 deferring costs no accuracy
  (docs/convergence.md).
* *Tail*: where a step waits with d = 0 although the work hides, the blocks that arrive last take a lag of one step of their own, as many
  as the wait takes to update. They stay in the tail; it only grows, up to half of the blocks.
* *Hysteresis*: a schedule that stalls is left at once. A less stale one is taken only after several observations that it would hide;
  their number doubles each time it turns out to stall.

S is a power of two: windows of S and 2 S steps then close at the same steps, and a change needs neither a pause nor more slots than
the larger S.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zenflow.schedule.staggered import UpdateSchedule

LARGEST_LAG = 2
"""Largest d of `publish_lag: auto`. A larger one hides no more work; it only absorbs more jitter."""

_SMALLEST_BOUND = 4

_STRIKES = 2
"""Consecutive observations with too much stall before the schedule changes."""

_PATIENCE, _LONGEST_PATIENCE = 2, 64
"""Consecutive observations before a less stale schedule is taken: initial and largest number."""

_PROBATION = 16
"""Number of observations within which leaving a less stale schedule doubles the patience."""

_BOUND_SLACK = 1.25

_SMALL_STALL = 0.02
"""Tolerated stall, as a share of a step."""

LARGEST_TAIL = 0.5
"""Largest share of the blocks in the tail. With more, forward passes lack as much as with S = 2, d = 0, or more."""

_TOLERATED_BLOCK = 0.25
"""Part of the last block's update that may be exposed before the block belongs to the tail."""


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Largest ratio of the worker's time to the device's that counts as hidden."""

    with_lag: float
    in_backward: float
    """d = 0, with each gradient submitted in backward, which is some 2/3 of a step."""
    at_the_end: float
    """d = 0, with all gradients submitted at the end of the step: the worker's whole time is stall."""


_STAY = _Limits(with_lag=0.95, in_backward=0.55, at_the_end=_SMALL_STALL)

_TURN_TO = _Limits(with_lag=0.85, in_backward=0.45, at_the_end=0.01)

_GO_BACK_TO = _Limits(with_lag=0.75, in_backward=0.4, at_the_end=0.01)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measurements over several steps of one schedule, of the slowest rank; the same numbers on every rank."""

    load: float
    """Worker's time per step / device's time per step without stall."""
    stall: float
    """Share of the time spent waiting for the worker."""
    max_interval_by_gradients: float | None = None
    """Steps after which the deferred gradient equals the gradient applied at once (`topk.importance`); None if unknown."""
    tail: float = 1.0
    """Share of all blocks that would be in the tail if every rank's tail took in the blocks that the rank waits for; 1 if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of schedule, or a longer tail."""

    schedule: UpdateSchedule
    tail: float = 0.0
    """Share of all blocks in the tail."""
    reason: str
    """For the log."""


def largest_power_of_two(limit: float) -> int:
    """The largest power of two <= `limit`; at least 1."""
    return 1 << max(0, int(math.log2(limit)) if limit >= 1 else 0)


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


def first_schedule(candidates: Sequence[UpdateSchedule], *, hides_in_backward: bool) -> UpdateSchedule:
    """The schedule that `auto` begins with: the least stale one that can hide at all.

    Args:
        candidates: S and d to choose from, the least stale first.
        hides_in_backward: whether d = 0 submits gradients in backward.
    """
    may_hide = (c for c in candidates if hides_in_backward or c.publish_lag > 0)
    return next(may_hide, candidates[0])


def blocks_waited_for(load: float, stall: float, *, n_blocks: int, update_interval: int) -> int:
    """Blocks that would have to be left out so that steps with d = 0 do not wait: those whose updates take as long as the wait.

    Args:
        load: see `Observation`.
        stall: see `Observation`.
        n_blocks: blocks of the rank.
        update_interval: S.

    Returns:
        A number for all S phases together; 0 where the stall is tolerated.
    """
    if stall <= _SMALL_STALL or load <= 0:
        return 0
    n_closing = -(-n_blocks // update_interval)
    exposed = n_closing * stall / (1 - stall) / load if stall < 1 else n_closing
    return min(n_blocks, update_interval * max(1, math.ceil(exposed - _TOLERATED_BLOCK)))


def observation_step(step: int, schedule: UpdateSchedule) -> int:
    """Step at whose end an observation that was reduced over the ranks at the end of `step` is available without waiting.

    The jobs published at that step were submitted after `step`, so the device had finished the reduction before.
    """
    return step + schedule.publish_lag + 1


class SchedulePolicy:
    """Chooses a schedule by observations. Deterministic, so that ranks with equal observations agree.

    Args:
        candidates: S and d to choose from, the least stale first; with one, those of a smaller S, a power of two, and the same d as well.
        hides_in_backward: whether d = 0 submits gradients in backward.
        allows_tail: whether the last blocks may take a lag of their own where d = 0.
    """

    def __init__(
        self,
        candidates: Sequence[UpdateSchedule],
        *,
        hides_in_backward: bool = False,
        allows_tail: bool = False,
    ) -> None:
        self._hides_in_backward = hides_in_backward
        self._allows_tail = allows_tail
        self.tail = 0.0
        """Share of all blocks in the tail."""
        self._candidates = list(candidates)
        self.schedule = first_schedule(self._candidates, hides_in_backward=hides_in_backward)
        """The current schedule."""
        self._max_interval: float | None = None
        """Running mean of `Observation.max_interval_by_gradients`."""
        self._strikes = 0
        self._calm = 0
        self._patience = _PATIENCE
        self._probation = 0

    def observe(self, observation: Observation) -> Decision | None:
        """Updates the policy with one observation; returns a change of schedule, or None."""
        new = observation.max_interval_by_gradients
        if new is not None:
            self._max_interval = 0.5 * ((new if self._max_interval is None else self._max_interval) + new)
        if self._probation > 0:
            self._probation -= 1
            if self._probation == 0:
                self._patience = max(self._patience // 2, _PATIENCE)
        decision = self._decide(observation, [c for c in self._candidates if c.update_interval <= self._bound()])
        if decision is not None:
            self._probation = _PROBATION if decision.schedule < self.schedule else 0
            self._strikes = self._calm = 0
            self.schedule, self.tail = decision.schedule, decision.tail
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The schedule and the state of its rules, as plain numbers."""
        return {
            "update_interval": self.schedule.update_interval,
            "publish_lag": self.schedule.publish_lag,
            "tail": self.tail,
            "max_interval_by_gradients": self._max_interval,
            "strikes": self._strikes,
            "calm": self._calm,
            "patience": self._patience,
            "probation": self._probation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; ignores a schedule that is not a candidate."""
        schedule = UpdateSchedule(update_interval=state["update_interval"], publish_lag=state["publish_lag"])
        if schedule not in self._candidates:
            return
        self.schedule, self._max_interval = schedule, state["max_interval_by_gradients"]
        # Missing in checkpoints of versions without it.
        self.tail = state.get("tail", 0.0) if self._allows_tail else 0.0
        self._strikes, self._calm = state["strikes"], state["calm"]
        self._patience, self._probation = state["patience"], state["probation"]

    def _bound(self) -> float:
        """Largest S by the gradient rule. The slack keeps noise from moving the current S."""
        if self._max_interval is None:
            return math.inf
        present = self.schedule.update_interval
        stays = present <= self._max_interval * _BOUND_SLACK and self._max_interval < 2 * present
        bound = present if stays else largest_power_of_two(self._max_interval)
        return max(_SMALLEST_BOUND, bound, self._candidates[0].update_interval)

    def _decide(self, observation: Observation, allowed: Sequence[UpdateSchedule]) -> Decision | None:
        load, stall = observation.load, observation.stall
        if self.schedule not in allowed:
            longest = next(c for c in reversed(allowed) if c.publish_lag == self.schedule.publish_lag)
            return Decision(
                schedule=longest,
                tail=self.tail,
                reason=f"the gradient rule allows windows of {self._bound():g} steps at most",
            )
        schedule: UpdateSchedule | None = None
        staler = [c for c in allowed if c > self.schedule]
        hiding = [c for c in staler if self._scaled(load, c) <= self._limit(c, _TURN_TO)]
        hides = load <= self._limit(self.schedule, _STAY)
        self._strikes = self._strikes + 1 if stall > _SMALL_STALL else 0
        reason = f"{stall:.1%} of the time is spent waiting"
        if not hides:
            schedule = hiding[0] if hiding else self._cheapest(staler)
            reason = f"the worker needs {load:.2f} of a step"
        if schedule is None and self._strikes >= _STRIKES:
            if self._can_grow_tail(observation.tail):
                return Decision(schedule=self.schedule, tail=observation.tail, reason=reason)
            # The work hides, but not all of it in time: a longer window would not change that.
            later = [c for c in hiding or staler if hides and c.publish_lag > self.schedule.publish_lag]
            schedule = later[0] if later else None
        elif hides and stall <= _SMALL_STALL:
            schedule = self._less_stale(load, allowed)
            reason = f"the worker needs {load:.2f} of a step only"
        if schedule is None:
            return None
        if schedule > self.schedule and self._probation > 0:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        return Decision(schedule=schedule, tail=self.tail, reason=reason)

    def _can_grow_tail(self, tail: float) -> bool:
        in_backward = self._hides_in_backward and self.schedule.publish_lag == 0
        return self._allows_tail and in_backward and self.tail < tail <= LARGEST_TAIL

    def _cheapest(self, staler: Sequence[UpdateSchedule]) -> UpdateSchedule | None:
        """The cheapest one of some schedules for the worker, with a lag where that is allowed; None if all cost what this one does."""
        present = self.schedule
        # A larger lag alone gives the worker no more time.
        cheaper = [c for c in staler if c.update_interval > present.update_interval or present.publish_lag == 0]
        longest = max((c.update_interval for c in cheaper), default=0)
        of_longest = [c for c in cheaper if c.update_interval == longest]
        return next((c for c in of_longest if c.publish_lag > 0), of_longest[-1] if of_longest else None)

    def _less_stale(self, load: float, allowed: Sequence[UpdateSchedule]) -> UpdateSchedule | None:
        """The least stale schedule that hides with a margin, after as many such observations as the patience."""
        sure = [c for c in allowed if c < self.schedule and self._scaled(load, c) <= self._limit(c, _GO_BACK_TO)]
        self._calm = self._calm + 1 if sure else 0
        return sure[0] if self._calm >= self._patience else None

    def _scaled(self, load: float, schedule: UpdateSchedule) -> float:
        return load * self._cost(schedule) / self._cost(self.schedule)

    def _cost(self, schedule: UpdateSchedule) -> float:
        tentative = self._hides_in_backward and schedule.publish_lag == 0
        return relative_cost(schedule.update_interval, tentative=tentative)

    def _limit(self, schedule: UpdateSchedule, limits: _Limits) -> float:
        """Largest load at which a schedule counts as hidden."""
        if schedule.publish_lag > 0:
            return limits.with_lag
        return limits.in_backward if self._hides_in_backward else limits.at_the_end
