"""Summary of a training: a table, and a sentence of advice on what limits it. Pure Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import zero_offload_traffic
from lightning_zenflow.monitor.metrics import difference, hidden_share
from lightning_zenflow.schedule.auto_policy import HIDDEN, LIKELY_HIDDEN, SMALL_STALL, relative_cost
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Reading
from lightning_zenflow.topk.selector import LONGEST_CHECK

_MANY_SKIPPED = 0.02

_LONGEST_WINDOW = 64

_FEWEST_SELECTIONS = 3
"""So many selections tell what one costs."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, apart from its counters."""

    step_s: Sequence[float]
    """Duration of each step, the first one included."""
    config: ZenFlowConfig
    worker_cores: int
    dtype_bytes: int
    """Bytes of a weight in the model's dtype."""
    accumulate_grad_batches: int


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Averages over the steps of a training, the first one left out."""

    steps: int
    """Number of these steps."""
    selections: int
    """Selections of columns in these steps."""
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


def summary(training: Training, before: Reading, now: Reading) -> str:
    """Formats the table and, where something limits, the advice.

    Args:
        training: the training, of two steps or more.
        before: reading after its first step, which compiles and allocates memory: it is counted, but not averaged.
        now: reading after its last step.
    """
    _, *step_s = training.step_s
    n, seconds = len(step_s), sum(step_s)
    host = sum(difference(now.host_stall_s, before.host_stall_s).values())
    device = difference(now.device_stall_s, before.device_stall_s)
    busy_s = now.worker_busy_s - before.worker_busy_s
    model_bytes = n * max(now.model_bytes, 1)
    d2h, h2d = (now.d2h_bytes - before.d2h_bytes) / model_bytes, (now.h2d_bytes - before.h2d_bytes) / model_bytes
    b, n_batches = training.dtype_bytes, training.accumulate_grad_batches
    their_d2h, their_h2d = (x / b for x in zero_offload_traffic(dtype_bytes=b, accumulate_grad_batches=n_batches))
    rows = {
        "step, median and p99": f"{_ms(quantile(step_s, 0.5))} and {_ms(quantile(step_s, 0.99))} ms",
        "waits": f"device {sum(device.values()) / seconds:.1%}, training thread {host / seconds:.1%} of the time",
        "CPU work": f"{_ms(busy_s / n)} ms a step, {hidden_share(busy_s, device):.1%} hidden",
        "copies a step": f"d2h {d2h:.2f}, h2d {h2d:.2f} model sizes (ZeRO-Offload: {their_d2h:.2f} and {their_h2d:.2f})",
        "schedule at the end": f"update_interval={now.update_interval}, publish_lag={now.publish_lag}{_tail(now)}",
    }
    in_backward = now.in_backward_jobs - before.in_backward_jobs
    late_share = (now.late_jobs - before.late_jobs) / in_backward if in_backward else 0.0
    if in_backward:
        rows["late blocks"] = f"{late_share:.1%} of those submitted in backward"
    situation = Situation(
        steps=n,
        selections=now.selections - before.selections,
        config=training.config,
        schedule=UpdateSchedule(update_interval=now.update_interval, publish_lag=now.publish_lag),
        step_s=seconds / n,
        stall_s={cause: s / n for cause, s in device.items()},
        worker_busy_s=busy_s / n,
        worker_cores=training.worker_cores,
        skipped_share=(now.skipped_steps - before.skipped_steps) / n,
        late_share=late_share,
    )
    head = f"ZenFlow: {n + 1} steps; the averages leave out the first one"
    lines = [head, tabulate(rows.items(), tablefmt="plain", disable_numparse=True)]
    sentence = advice(situation)
    return "\n".join(lines if sentence is None else [*lines, sentence])


def _tail(now: Reading) -> str:
    if now.tail_share == 0:
        return ""
    return f"; the last {now.tail_share:.0%} of the blocks owned by the device"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least the given share of the values, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def advice(situation: Situation) -> str | None:
    """The largest limit and its remedy in a sentence; None if waits are negligible."""
    if situation.skipped_share > _MANY_SKIPPED:
        return (
            f"{situation.skipped_share:.0%} of the steps were skipped because their gradient was not finite:"
            " lower the learning rate or train in bf16."
        )
    for cause in sorted(situation.stall_s, key=lambda cause: situation.stall_s[cause], reverse=True):
        share = situation.stall_s[cause] / situation.step_s
        if share < SMALL_STALL:
            break
        sentence = _remedy(cause, situation, share)
        if sentence is not None:
            return sentence
    return None


def _remedy(cause: str, situation: Situation, share: float) -> str | None:
    """Advice on waits with one cause; None if nothing can be done about them, or if they pass by themselves."""
    of_the_time = f"{share:.0%} of the time"
    match cause:
        case "publish_wait" | "slot":
            return _advice_on_worker(situation, of_the_time)
        case "publish_buffer":
            return (
                f"{of_the_time} is spent in synchronous steps:"
                " lower full_warm_up_rounds, or validate and save checkpoints less often."
            )
        case "select":
            return _advice_on_selection(situation, share)
        case "flush":
            return f"{of_the_time} is spent completing updates before validations and checkpoints: have fewer of them."
        case "loss_scale":
            return f"{of_the_time} is spent waiting for the dynamic loss scale of fp16: train in bf16, or set a fixed loss scale."
        case _:
            return None


def _advice_on_selection(situation: Situation, share: float) -> str | None:
    """Advice on the waits of selections: the interval that makes them negligible."""
    config = situation.config
    # "auto" looks often at first, and ever less often while a choice fits: what it costs a short run, it does not cost a long one.
    settling = config.select_interval == "auto" and situation.steps < 2 * LONGEST_CHECK
    if settling or situation.selections < _FEWEST_SELECTIONS:
        return None
    steps = math.ceil(situation.steps / situation.selections * share / SMALL_STALL)
    interval = "" if config.select_strategy == "epoch" else f" to {steps}"
    return f"{share:.0%} of the time is spent selecting columns: raise select_interval{interval}."


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
    present = situation.schedule.update_interval
    tentative = situation.config.submits_in_backward and situation.schedule.publish_lag == 0
    if situation.config.update_interval == "auto":
        # `auto` has not chosen an allowed S: the gradient rule forbids it, or training was too short.
        if 2 * present <= situation.config.max_update_interval:
            return None
        candidates = [present << i for i in range(1, 7)]
    else:
        candidates = list(range(present + 1, _LONGEST_WINDOW + 1))
    for interval in candidates:
        scaled = load * relative_cost(interval, tentative=tentative) / relative_cost(present, tentative=tentative)
        if interval <= _LONGEST_WINDOW and scaled <= LIKELY_HIDDEN:
            return interval
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
