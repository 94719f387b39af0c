"""Summary of a training: a table, and a sentence of advice on what limits it. Pure Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.monitor.metrics import difference
from lightning_zenflow.schedule.auto_policy import HIDDEN, LIKELY_HIDDEN, SMALL_STALL, relative_cost
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Reading

_MANY_SKIPPED = 0.02

_LONGEST_WINDOW = 64

_REMEDIES = {
    "publish_buffer": "{} is spent in synchronous steps: lower full_warm_up_rounds, or validate and save checkpoints less often.",
    "select": "{} is spent selecting columns: raise select_interval.",
    "flush": "{} is spent completing updates before validations and checkpoints: have fewer of them.",
    "loss_scale": "{} is spent waiting for the dynamic loss scale of fp16: train in bf16, or set a fixed loss scale.",
}
"""Advice by cause of a wait; the worker's causes have a function, and nothing can be done about the others."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Averages over the steps of a training, the first one left out."""

    config: ZenFlowConfig
    schedule: UpdateSchedule
    """S and d at the end."""
    step_s: float
    """Duration of a step, waits included."""
    stall_s: Mapping[str, float]
    """Waits of the device in a step, by cause (`stalls.CAUSES`)."""
    worker_busy_s: float
    """Computation of the worker in a step."""
    worker_cores: int
    skipped_share: float
    """Share of the steps that were skipped because the gradient norm was not finite."""
    late_share: float = 0.0
    """Share of the blocks submitted in backward that were not updated when their step ended."""


def summary(step_s: Sequence[float], before: Reading, now: Reading, *, config: ZenFlowConfig, worker_cores: int) -> str:
    """Formats the table and, where something limits, the advice.

    Args:
        step_s: duration of each step but the first, which compiles and allocates memory; one or more.
        before: reading after the first step.
        now: reading after the last step.
        config: the training's.
        worker_cores: number of the worker's cores.
    """
    n, seconds = len(step_s), sum(step_s)
    host = sum(difference(now.host_stall_s, before.host_stall_s).values())
    device = difference(now.device_stall_s, before.device_stall_s)
    busy_s = now.worker_busy_s - before.worker_busy_s
    hidden = (
        max(0.0, 1.0 - sum(device[cause] for cause in ("publish_wait", "slot", "flush")) / busy_s) if busy_s else 1.0
    )
    model_bytes = n * max(now.model_bytes, 1)
    d2h, h2d = (now.d2h_bytes - before.d2h_bytes) / model_bytes, (now.h2d_bytes - before.h2d_bytes) / model_bytes
    tail = f"; the last {now.tail_share:.0%} of the blocks are the tail" if now.tail_share else ""
    rows = {
        "step, median and p99": f"{_ms(quantile(step_s, 0.5))} and {_ms(quantile(step_s, 0.99))} ms",
        "waits": f"device {sum(device.values()) / seconds:.1%}, training thread {host / seconds:.1%} of the time",
        "CPU work": f"{_ms(busy_s / n)} ms a step, {hidden:.1%} hidden",
        "copies a step": f"d2h {d2h:.2f}, h2d {h2d:.2f} model sizes",
        "schedule at the end": f"update_interval={now.update_interval}, publish_lag={now.publish_lag}{tail}",
    }
    in_backward = now.in_backward_jobs - before.in_backward_jobs
    late_share = (now.late_jobs - before.late_jobs) / in_backward if in_backward else 0.0
    if in_backward:
        rows["late blocks"] = f"{late_share:.1%} of those submitted in backward"
    situation = Situation(
        config=config,
        schedule=UpdateSchedule(update_interval=now.update_interval, publish_lag=now.publish_lag),
        step_s=seconds / n,
        stall_s={cause: s / n for cause, s in device.items()},
        worker_busy_s=busy_s / n,
        worker_cores=worker_cores,
        skipped_share=(now.skipped_steps - before.skipped_steps) / n,
        late_share=late_share,
    )
    head = f"ZenFlow: {n + 1} steps; the averages leave out the first one"
    lines = [head, tabulate(rows.items(), tablefmt="plain", disable_numparse=True)]
    sentence = advice(situation)
    return "\n".join(lines if sentence is None else [*lines, sentence])


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least the given share of the values, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def advice(situation: Situation) -> str | None:
    """The largest limit that something can be done about, and its remedy, in a sentence; None if waits are negligible."""
    if situation.skipped_share > _MANY_SKIPPED:
        return (
            f"{situation.skipped_share:.0%} of the steps were skipped because their gradient was not finite:"
            " lower the learning rate or train in bf16."
        )
    for cause, seconds in sorted(situation.stall_s.items(), key=lambda item: item[1], reverse=True):
        share = seconds / situation.step_s
        if share < SMALL_STALL:
            break
        of_the_time = f"{share:.0%} of the time"
        if cause in ("publish_wait", "slot"):
            return _advice_on_worker(situation, of_the_time)
        # With "auto", selections become rarer by themselves.
        if cause in _REMEDIES and not (cause == "select" and situation.config.select_interval == "auto"):
            return _REMEDIES[cause].format(of_the_time)
    return None


def _advice_on_worker(situation: Situation, share: str) -> str:
    """Advice on jobs that are done too late."""
    config, schedule = situation.config, situation.schedule
    load = situation.worker_busy_s / max(situation.step_s - sum(situation.stall_s.values()), 1e-9)
    if not config.overlap_step:
        return f"{share} is spent waiting for the CPU, since overlap_step is false: set it to true."
    if schedule.publish_lag == 0 and config.publish_lag != "auto" and situation.late_share > 0:
        late = f"{share} is spent waiting for the CPU: {situation.late_share:.0%} of the blocks were not updated when backward ended."
        tail = "" if config.allows_tail else "tail to device, or "
        return f"{late} Set publish_lag to 1, or if runs need not repeat, {tail}publish_lag to auto."
    if schedule.publish_lag == 0 and config.publish_lag != "auto":
        return f"{share} is spent waiting for the CPU, since publish_lag is 0: set it to 1, or to auto if runs need not repeat."
    if load <= HIDDEN:
        lag = "" if config.publish_lag == "auto" else f"raise publish_lag to {schedule.publish_lag + 1} or "
        return (
            f"{share} is spent waiting for the CPU, although it needs only {load:.1f} steps per update:"
            f" {lag}keep other processes off the worker's cores."
        )
    remedies = []
    interval = _hiding_interval(load, situation)
    if interval is not None:
        key = "max_update_interval" if config.update_interval == "auto" else "update_interval"
        remedies.append(f"raise {key} to {interval}")
    more = math.ceil(situation.worker_cores * (load / LIKELY_HIDDEN - 1))
    remedies.append(f"give the worker {more} more core{'' if more == 1 else 's'}")
    return f"The CPU needs {load:.1f} steps per update: {' or '.join(remedies)}."


def _hiding_interval(load: float, situation: Situation) -> int | None:
    """The smallest larger S whose work hides; None if there is none, or if `auto` is free to choose it."""
    present, config = situation.schedule.update_interval, situation.config
    tentative = config.submits_in_backward and situation.schedule.publish_lag == 0
    candidates: Sequence[int] = range(present + 1, _LONGEST_WINDOW + 1)
    if config.update_interval == "auto":
        # `auto` has not chosen an allowed S: the gradient rule forbids it, or training was too short.
        if 2 * present <= config.max_update_interval:
            return None
        candidates = [s for s in candidates if s % present == 0 and (s // present).bit_count() == 1]
    for interval in candidates:
        scaled = load * relative_cost(interval, tentative=tentative) / relative_cost(present, tentative=tentative)
        if scaled <= LIKELY_HIDDEN:
            return interval
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
