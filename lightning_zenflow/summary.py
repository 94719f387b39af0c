"""What is said at the end of a training: a table and a sentence of advice. Pure Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from lightning_zenflow.advice import Situation, advice
from lightning_zenflow.auto_schedule import Pace
from lightning_zenflow.byte_counts import zero_offload_traffic
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.metrics import Reading, difference, hidden_share


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
    pace = Pace(update_interval=now.update_interval, publish_lag=now.publish_lag)
    down = (now.down_bytes - before.down_bytes) / n / max(now.model_bytes, 1)
    up = (now.up_bytes - before.up_bytes) / n / max(now.model_bytes, 1)
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
        ("schedule at the end", f"update_interval={pace.update_interval}, publish_lag={pace.publish_lag}"),
    ]
    situation = Situation(
        step_s=seconds / n,
        stall_s={cause: s / n for cause, s in device.items()},
        worker_busy_s=busy_s / n,
        worker_cores=training.worker_cores,
        pace=pace,
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
