"""One sentence about what limits a training, and what to do about it. Pure Python."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zenflow.auto_schedule import Pace, relative_cost

NEGLIGIBLE_SHARE = 0.02
"""Of a step's time: less waiting than this limits nothing; `update_interval: auto` stays with as much."""

_HIDDEN, _LIKELY_HIDDEN = 0.95, 0.85
"""Share of a step up to which the worker's time hides; the one to aim at."""
_MANY_SKIPPED = 0.02
_LONGEST_WINDOW = 64


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a training looked like, on average over its steps."""

    step_s: float
    """Time of a step, waiting included."""
    stall_s: Mapping[str, float]
    """What the device waited in a step, by cause (`stalls.CAUSES`)."""
    worker_busy_s: float
    """What the worker computed for a step."""
    worker_cores: int
    pace: Pace
    """At the end."""
    auto_interval: bool
    """Whether `update_interval` is "auto"."""
    auto_lag: bool
    """Whether `publish_lag` is "auto"."""
    max_update_interval: int
    overlap_step: bool
    skipped_share: float
    """Share of the steps whose gradient norm was not finite."""


def advice(situation: Situation) -> str | None:
    """What limits most and what to change; None if nothing limits noticeably."""
    if situation.skipped_share > _MANY_SKIPPED:
        return (
            f"{situation.skipped_share:.0%} of the steps changed nothing because their gradient was not finite:"
            " lower the learning rate or train in bf16."
        )
    if sum(situation.stall_s.values()) < NEGLIGIBLE_SHARE * situation.step_s:
        return None
    cause = max(situation.stall_s, key=lambda cause: situation.stall_s[cause])
    share = f"{situation.stall_s[cause] / situation.step_s:.0%} of the time"
    match cause:
        case "publish_wait":
            return _for_a_slow_worker(situation, share)
        case "publish_buffer":
            return f"{share} is spent in synchronous steps: lower full_warm_up_rounds, or validate and save checkpoints less often."
        case "select":
            return f"{share} is spent selecting columns: raise select_interval."
        case "flush":
            return f"{share} is spent completing updates before validations and checkpoints: have fewer of them."
        case _:
            return None


def _for_a_slow_worker(situation: Situation, share: str) -> str:
    """The worker's results come too late."""
    pace = situation.pace
    load = situation.worker_busy_s / max(situation.step_s - sum(situation.stall_s.values()), 1e-9)
    if not situation.overlap_step:
        return f"{share} is spent waiting for the CPU, since overlap_step is false: set it to true."
    if pace.publish_lag == 0 and not situation.auto_lag:
        return f"{share} is spent waiting for the CPU, since publish_lag is 0: set it to 1 or auto."
    if load <= _HIDDEN:
        lag = "" if situation.auto_lag else f"raise publish_lag to {pace.publish_lag + 1} or "
        return (
            f"{share} is spent waiting although the CPU needs only {load:.1f} steps per update:"
            f" {lag}keep other processes off the worker's cores."
        )
    remedies = []
    interval = _hiding_interval(load, situation)
    if interval is not None:
        key = "max_update_interval" if situation.auto_interval else "update_interval"
        remedies.append(f"raise {key} to {interval}")
    more = math.ceil(situation.worker_cores * (load / _LIKELY_HIDDEN - 1))
    remedies.append(f"give the worker {more} more core{'' if more == 1 else 's'}")
    return f"The CPU needs {load:.1f} steps per update: {' or '.join(remedies)}."


def _hiding_interval(load: float, situation: Situation) -> int | None:
    """The smallest longer S whose work hides; None if there is none, or if `auto` may take it by itself."""
    present = situation.pace.update_interval
    if situation.auto_interval:
        # What it has not taken although it was allowed to, the gradient rule forbids or time did not suffice for.
        if 2 * present <= situation.max_update_interval:
            return None
        candidates = [present << i for i in range(1, 7)]
    else:
        candidates = list(range(present + 1, _LONGEST_WINDOW + 1))
    for interval in candidates:
        scaled = load * relative_cost(interval) / relative_cost(present)
        if interval <= _LONGEST_WINDOW and scaled <= _LIKELY_HIDDEN:
            return interval
    return None
