"""Times and metrics of a training's steps, and its summary in two lines with a sentence of advice, for the Trainer's loop and Fabric's.

docs/tuning.md lists `METRICS`; a test compares both with what a training logs.
"""

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.schedule import HIDDEN, SMALL_STALL
from lightning_zenflow.telemetry import CAUSES, Cause, Reading

if TYPE_CHECKING:
    from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer

_Formula = Callable[[Reading, float], float | None]
"""Of a metric, from `Reading.since` and the seconds between the two readings; None: not known yet."""


def _waits(*causes: Cause) -> _Formula:
    """Share of the time in which the device was idle because of these causes, in percent."""
    return lambda run, seconds: 100 * sum(run.device_stall_s[cause] for cause in causes) / seconds


def _percent(share: float | None) -> float | None:
    return None if share is None or not math.isfinite(share) else 100 * share


_WORKER: tuple[Cause, ...] = ("publish_wait", "slot", "correction")

METRICS: dict[str, _Formula] = {
    "zenflow/stall/device_percent": _waits(*CAUSES),
    "zenflow/stall/host_percent": lambda run, seconds: 100 * sum(run.host_stall_s.values()) / seconds,
    # Parts of the device's; each cause is in one.
    "zenflow/stall/worker_percent": _waits("publish_wait", "slot"),
    "zenflow/stall/correction_percent": _waits("correction"),
    "zenflow/stall/buffer_percent": _waits("publish_buffer"),
    "zenflow/stall/select_percent": _waits("select"),
    "zenflow/stall/flush_percent": _waits("flush"),
    "zenflow/stall/other_percent": _waits("restart", "reserve", "loss_scale"),
    "zenflow/stall/skipped_steps": lambda run, _: run.skipped_steps,
    "zenflow/stall/worker_restarts": lambda run, _: run.worker_restarts,
    "zenflow/overlap/step_ms": lambda run, seconds: 1e3 * seconds / run.steps,
    "zenflow/overlap/worker_busy_percent": lambda run, seconds: 100 * run.worker_busy_s / seconds,
    "zenflow/overlap/update_interval_steps": lambda run, _: run.update_interval,
    "zenflow/overlap/publish_lag_steps": lambda run, _: run.publish_lag,
    "zenflow/overlap/late_blocks_percent": lambda run, _: (
        100 * run.late_jobs / run.in_backward_jobs if run.in_backward_jobs else None
    ),
    "zenflow/overlap/clip_prediction_error_percent": lambda run, _: _percent(run.factor_error),
    "zenflow/overlap/steps_in_backward_percent": lambda run, _: 100 * run.steps_in_backward / run.steps,
    "zenflow/overlap/corrected_steps_percent": lambda run, _: 100 * run.corrected_steps / run.steps,
    "zenflow/traffic/d2h_model_sizes": lambda run, _: run.d2h_bytes / (run.model_bytes * run.steps),
    "zenflow/traffic/h2d_model_sizes": lambda run, _: run.h2d_bytes / (run.model_bytes * run.steps),
    "zenflow/selection/device_owned_percent": lambda run, _: 100 * run.owned_share,
    "zenflow/selection/device_squared_norm_percent": lambda run, _: _percent(run.owned_norm_share),
    "zenflow/memory/arena_GB": lambda run, _: run.arena_bytes / 1e9,
    "zenflow/memory/device_peak_GB": lambda run, _: run.device_peak_bytes / 1e9,
}
"""Metric -> formula; docs/tuning.md has their meaning. Milliseconds, percent, 1e9 bytes (GB), steps; one without a unit is a count."""


def interval_metrics(before: Reading, now: Reading, *, seconds: float) -> dict[str, float]:
    """Metrics, by name in `METRICS`, of the one or more steps between two readings, which took `seconds` > 0.

    Metrics that are not known yet are missing.
    """
    run = now.since(before)
    assert run.steps > 0 and seconds > 0
    values = {name: formula(run, seconds) for name, formula in METRICS.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


_MANY_SKIPPED = 0.02

_MANY_AT_END = 0.1

_SHOWN = 0.01
"""Smallest share of a step that is worth words."""

_FEW = 0.1
"""Largest share of the CPU's work that is good news where it was waited for."""

_REMEDIES = {
    "publish_buffer": "in synchronous steps: lower full_warm_up_rounds, or validate and save checkpoints less often",
    "select": "selecting columns: raise select_interval",
    "flush": "completing updates before validations and checkpoints: have fewer of them",
    "loss_scale": "waiting for the dynamic loss scale of fp16: train in bf16, or set a fixed loss scale",
}
"""Advice by cause of a wait, beside those for the worker; nothing can be done about the others."""


class StepMeter:
    """Measures the steps of a training, from its own construction on. It never synchronises the device.

    Args:
        optimizer: source of the counters.

    Attributes:
        step_s: duration of each step so far: waits included, pauses excluded.
        end_ns: end of the last step.
    """

    def __init__(self, optimizer: "ZenFlowOptimizer") -> None:
        self.step_s = array("d")
        self._optimizer = optimizer
        self._n_read = 0
        self._last_read = self._before = optimizer.parts.read_counters()
        self._steps_before, self._n_first = self._before.steps, 0
        self._pause_ns: int | None = None
        self.end_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        """Takes the time since the last call: of a step, or of the several of a batch, each an equal part. That of a step without
        gradients counts to the next.
        """
        self.resume()
        n = self._optimizer.telemetry.steps - self._steps_before - len(self.step_s)
        if n == 0:
            return
        now_ns = time.perf_counter_ns()
        self.step_s.extend([1e-9 * (now_ns - self.end_ns) / n] * n)
        self.end_ns = now_ns
        if self._n_first == 0:
            # The summary averages over the steps behind the first ones.
            self._n_first, self._before = n, self._optimizer.parts.read_counters()

    def pause(self) -> None:
        """Excludes what follows, such as validation, from the step that is being measured."""
        if self._pause_ns is None:
            self._pause_ns = self._ns_without_waits()

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        if self._pause_ns is not None:
            # The flush before validation is a stall of training.
            self.end_ns += self._ns_without_waits() - self._pause_ns
            self._pause_ns = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the steps since the last call, by name in `METRICS`; none if no step with gradients has ended since."""
        now = self._optimizer.parts.read_counters()
        if now.steps == self._last_read.steps:
            return {}
        before, self._last_read = self._last_read, now
        seconds = sum(self.step_s[self._n_read :])
        self._n_read = len(self.step_s)
        return interval_metrics(before, self._last_read, seconds=seconds)

    def averages(self) -> dict[str, float]:
        """As `metrics`, of all steps that the summary is about."""
        now, step_s = self._optimizer.parts.read_counters(), self.step_s[self._n_first :]
        return interval_metrics(self._before, now, seconds=sum(step_s)) if step_s else {}

    def summary(self) -> str | None:
        """Times, waits and advice; None before the second call of `end_step`."""
        if len(self.step_s) == self._n_first:
            return None
        now, config = self._optimizer.parts.read_counters(), self._optimizer.zenflow_config
        fp16 = self._optimizer.parts.rank.dtype == torch.float16
        # Infinity: the norm is asked for.
        clips = self._optimizer.clip_grad > 0
        return summary(self.step_s[self._n_first :], self._before, now, config, fp16=fp16, clips=clips)

    def _ns_without_waits(self) -> int:
        return time.perf_counter_ns() - round(1e9 * sum(self._optimizer.telemetry.seconds.values()))


def summary(
    step_s: Sequence[float], before: Reading, now: Reading, config: ZenFlowConfig, *, fp16: bool, clips: bool = False
) -> str:
    """Formats the summary and, where something limits, the advice.

    Args:
        step_s: duration of each step but the first ones, which compile and allocate memory; one or more.
        before: reading after the first ones.
        now: reading after the last step.
        config: of the training.
        fp16: whether the model's type is float16.
        clips: whether gradients are clipped.
    """
    n, seconds = len(step_s), sum(step_s)
    run = now.since(before)
    host, busy_s, model_bytes = sum(run.host_stall_s.values()), run.worker_busy_s, n * run.model_bytes
    waits = {cause: s / seconds for cause, s in run.device_stall_s.items()}
    work = f"CPU work {_ms(busy_s / n)} ms a step"
    waited_s = sum(run.device_stall_s[cause] for cause in (*_WORKER, "flush"))
    # A low share of little work would sound like a fault.
    if busy_s > _SHOWN * seconds and (waited_s < _FEW * busy_s or waited_s >= SMALL_STALL * seconds):
        work += f", {max(0.0, 1.0 - waited_s / busy_s):.0%} hidden"
    details = [
        work,
        f"copies a step: d2h {run.d2h_bytes / model_bytes:.2f}, h2d {run.h2d_bytes / model_bytes:.2f} model sizes",
        f"update_interval={now.update_interval}, publish_lag={now.publish_lag}",
    ]
    if run.in_backward_jobs and sum(waits.values()) > _SHOWN:
        details.append(f"{run.late_jobs / run.in_backward_jobs:.1%} of the blocks late")
    in_time = run.steps_in_backward - run.corrected_steps
    speculates = config.submits_in_backward and not config.predicts_clipping and now.publish_lag == 0
    if speculates:
        details.append(
            f"update in backward in {in_time / n:.1%} of the steps, corrected in {run.corrected_steps / n:.1%}"
        )
    lines = [
        f"ZenFlow: {n + before.steps} steps, median {_ms(quantile(step_s, 0.5))} ms, p99 {_ms(quantile(step_s, 0.99))} ms;"
        f" waits of the device {sum(waits.values()):.1%}, of the training thread {host / seconds:.1%}",
        "; ".join(details),
    ]
    at_most = config.update_interval == "auto" and now.update_interval >= config.max_update_interval
    sentence = advice(
        waits,
        config,
        worker=busy_s / seconds,
        skipped=(now.skipped_steps - before.skipped_steps) / n,
        at_end=1.0 - in_time / n if speculates else 0.0,
        followed=run.followed_steps / n,
        longest=at_most,
        fp16=fp16,
        clips=clips,
    )
    return "\n".join(lines if sentence is None else [*lines, sentence])


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least the given share of the values, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def advice(
    waits: Mapping[str, float],
    config: ZenFlowConfig,
    *,
    worker: float,
    skipped: float,
    at_end: float = 0.0,
    followed: float = 0.0,
    longest: bool = False,
    fp16: bool = False,
    clips: bool = False,
) -> str | None:
    """The largest limit that the user can do something about, and its remedy, in a sentence; None if waits are negligible.

    Args:
        waits: of the device, by cause (`CAUSES`), as shares of the time.
        config: what is `auto` is not advised.
        worker: the worker's computation, as a share of the time.
        skipped: share of the steps that were skipped because the gradient norm was not finite.
        at_end: share of the steps whose update began at their end, at least for a part of the weights.
        followed: share of the steps that were flushed because weights had been written in place.
        longest: whether `update_interval: auto` has reached `max_update_interval`.
        fp16: whether the model's type is float16.
        clips: whether gradients are clipped.
    """
    if skipped > _MANY_SKIPPED:
        otherwise = " or train in bf16" if fp16 else ", or look for NaN in the loss"
        return f"{skipped:.0%} of the steps were skipped because their gradient was not finite: lower the learning rate{otherwise}."
    for cause, share in sorted(waits.items(), key=lambda item: item[1], reverse=True):
        if share < SMALL_STALL:
            break
        if cause in _WORKER and at_end > _MANY_AT_END:
            why, remedy = (
                f"the update begins at the end of about {at_end:.0%} of the steps",
                "in manual optimization, run the backward pass in the closure of `optimizer.step`; else",
            )
            if clips:
                why = f"the update begins in about {at_end:.0%} of the steps when the norm of their gradients is known"
                remedy = "clip to a larger norm, or"
            return (
                f"{share:.0%} of the time is spent waiting for the CPU, because {why}: {remedy} allow predicted factors"
                " (clip_prediction=True)."
            )
        if cause in _WORKER:
            load = worker / max(1.0 - sum(waits.values()), 1e-9)
            if load < _SHOWN:
                continue  # its work does not explain them
            if load > HIDDEN:
                remedy = "give the worker more cores"
                if longest or config.update_interval != "auto":
                    remedy += f", or raise {'max_' * longest}update_interval"
                return f"The CPU needs {load:.1f} steps per update: {remedy}."
            remedy = "keep other processes off the worker's cores"
            if config.publish_lag != "auto":
                remedy += ", or raise publish_lag"
            load_is_small = f"although it needs only {load:.1f} steps per update"
            return f"{share:.0%} of the time is spent waiting for the CPU, {load_is_small}: {remedy}."
        if cause == "flush" and followed > _MANY_AT_END:
            return f"{share:.0%} of the time is spent completing updates, as weights are written in place: write them in fewer steps."
        if cause in _REMEDIES:
            return f"{share:.0%} of the time is spent {_REMEDIES[cause]}."
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
