"""What is said at the end of a training: a table and a sentence of advice. Pure Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import zero_offload_traffic
from lightning_zenflow.monitor.metrics import difference, hidden_share
from lightning_zenflow.schedule.auto_policy import relative_cost
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Reading


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is known of a training besides its counters."""

    step_s: Sequence[float]
    """Time of each step between the readings."""
    config: ZenFlowConfig
    worker_cores: int
    dtype_bytes: int
    """Of a weight in the model's type."""
    accumulate_grad_batches: int


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values (there is one) does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(training: Training, before: Reading, now: Reading) -> str:
    """The table and, where something limits, the sentence.

    Args:
        training: what the readings do not say.
        before: the reading before the first of the steps.
        now: the one after the last.
    """
    n, seconds = len(training.step_s), sum(training.step_s)
    host = sum(difference(now.host_stall_s, before.host_stall_s).values())
    device = difference(now.device_stall_s, before.device_stall_s)
    busy_s = now.worker_busy_s - before.worker_busy_s
    schedule = UpdateSchedule(update_interval=now.update_interval, publish_lag=now.publish_lag)
    down = (now.d2h_bytes - before.d2h_bytes) / n / max(now.model_bytes, 1)
    up = (now.h2d_bytes - before.h2d_bytes) / n / max(now.model_bytes, 1)
    theirs = zero_offload_traffic(
        dtype_bytes=training.dtype_bytes, accumulate_grad_batches=training.accumulate_grad_batches
    )
    their_down, their_up = (x / training.dtype_bytes for x in theirs)
    rows = [
        (
            "step, median and p99",
            f"{_ms(quantile(training.step_s, 0.5))} and {_ms(quantile(training.step_s, 0.99))} ms",
        ),
        ("waiting", f"device {sum(device.values()) / seconds:.1%}, training thread {host / seconds:.1%} of the time"),
        ("CPU work", f"{_ms(busy_s / n)} ms a step, {hidden_share(busy_s, device):.1%} hidden"),
        (
            "copied a step",
            f"{down:.2f} model sizes down, {up:.2f} up (ZeRO-Offload: {their_down:.2f} and {their_up:.2f})",
        ),
        ("schedule at the end", f"update_interval={schedule.update_interval}, publish_lag={schedule.publish_lag}"),
    ]
    situation = Situation(
        step_s=seconds / n,
        stall_s={cause: s / n for cause, s in device.items()},
        worker_busy_s=busy_s / n,
        worker_cores=training.worker_cores,
        schedule=schedule,
        auto_interval=training.config.update_interval == "auto",
        auto_lag=training.config.publish_lag == "auto",
        max_update_interval=training.config.max_update_interval,
        overlap_step=training.config.overlap_step,
        skipped_share=(now.skipped_steps - before.skipped_steps) / n,
    )
    lines = [f"ZenFlow: {n} steps", tabulate(rows, tablefmt="plain", disable_numparse=True)]
    sentence = advice(situation)
    return "\n".join(lines if sentence is None else [*lines, sentence])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


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
    schedule: UpdateSchedule
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
    schedule = situation.schedule
    load = situation.worker_busy_s / max(situation.step_s - sum(situation.stall_s.values()), 1e-9)
    if not situation.overlap_step:
        return f"{share} is spent waiting for the CPU, since overlap_step is false: set it to true."
    if schedule.publish_lag == 0 and not situation.auto_lag:
        return f"{share} is spent waiting for the CPU, since publish_lag is 0: set it to 1 or auto."
    if load <= _HIDDEN:
        lag = "" if situation.auto_lag else f"raise publish_lag to {schedule.publish_lag + 1} or "
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
    present = situation.schedule.update_interval
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
