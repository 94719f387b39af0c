"""Times and metrics of a training's steps, and its summary in two lines with a sentence of advice, for the Trainer's loop and Fabric's.

docs/tuning.md repeats `METRICS`; a test compares both with what a training logs.
"""

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.schedule import HIDDEN, SMALL_STALL
from lightning_zenflow.telemetry import CAUSES, Cause, Reading

if TYPE_CHECKING:
    from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer

_WAITS: dict[str, tuple[Cause, ...]] = {
    "worker": ("publish_wait", "slot"),
    "correction": ("correction",),
    "buffer": ("publish_buffer",),
    "select": ("select",),
    "flush": ("flush",),
    "other": ("restart", "reserve", "loss_scale"),
}
"""Waits of the device that have a metric, by the causes that it adds up; each cause in one."""

_WORKER = (*_WAITS["worker"], *_WAITS["correction"])

METRICS: dict[str, str] = {
    "zenflow/stall/device_percent": "share of the step time in which the device was idle because of waits",
    "zenflow/stall/host_percent": "share of the step time in which the training thread waited",
    "zenflow/stall/worker_percent": "part of `device_percent`: the worker's results were not ready, or no slot or buffer was free",
    "zenflow/stall/correction_percent": "part of `device_percent`: weights were published again with the true clip factor",
    "zenflow/stall/buffer_percent": "part of `device_percent`: the device still read a buffer that was needed again",
    "zenflow/stall/select_percent": "part of `device_percent`: columns were selected",
    "zenflow/stall/flush_percent": "part of `device_percent`: updates were completed before a validation or a checkpoint",
    "zenflow/stall/other_percent": "part of `device_percent`: a worker's restart, more host memory, fp16's loss scale",
    "zenflow/stall/skipped_steps": "steps without an update since the start, because the gradient norm was not finite",
    "zenflow/stall/worker_restarts": "restarts of a killed worker since the start",
    "zenflow/overlap/step_ms": "step time, waits included, validation excluded",
    "zenflow/overlap/worker_busy_percent": "computation of the worker as a share of the step time",
    "zenflow/overlap/update_interval_steps": "S",
    "zenflow/overlap/publish_lag_steps": "d",
    "zenflow/overlap/late_blocks_percent": "share of the blocks submitted in backward that were not updated when the training thread"
    " ended the step, or fetched them from host memory; on CUDA the device is behind it",
    "zenflow/overlap/clip_prediction_error_percent": "mean error of the clip factors in backward; of one step",
    "zenflow/overlap/steps_in_backward_percent": "share of the steps that submitted blocks in backward",
    "zenflow/overlap/corrected_steps_percent": "share of the steps in which a block in backward had another clip factor than the true one,"
    " and was published again; with `clip_prediction: false`",
    "zenflow/traffic/d2h_model_sizes": "device to host, per step, in sizes of this rank's weights",
    "zenflow/traffic/h2d_model_sizes": "host to device, per step, in sizes of this rank's weights",
    "zenflow/selection/device_owned_percent": "device-owned share of the weights",
    "zenflow/selection/device_squared_norm_percent": "share of the squared norm of the matrices' gradients in device-owned columns",
    "zenflow/memory/arena_GB": "reserved shared host memory",
    "zenflow/memory/device_peak_GB": "peak of the CUDA memory allocated by torch; 0 on a CPU device",
}
"""Metric -> meaning. Milliseconds, percent, 1e9 bytes (GB), steps; a metric without a unit is a count."""


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds between two readings, for every cause."""
    return {cause: now.get(cause, 0.0) - before.get(cause, 0.0) for cause in CAUSES}


def interval_metrics(before: Reading, now: Reading, *, seconds: float) -> dict[str, float]:
    """Metrics, by name in `METRICS`, of the one or more steps between two readings, which took `seconds` > 0.

    Metrics that are not known yet are missing.
    """
    steps = now.steps - before.steps
    assert steps > 0 and seconds > 0
    host = difference(now.host_stall_s, before.host_stall_s)
    device = difference(now.device_stall_s, before.device_stall_s)
    in_backward = now.in_backward_jobs - before.in_backward_jobs
    model_bytes = max(now.model_bytes, 1) * steps
    metrics = {
        "stall/device_percent": 100 * sum(device.values()) / seconds,
        "stall/host_percent": 100 * sum(host.values()) / seconds,
        **{f"stall/{name}_percent": 100 * sum(device[c] for c in of) / seconds for name, of in _WAITS.items()},
        "stall/skipped_steps": now.skipped_steps,
        "stall/worker_restarts": now.worker_restarts,
        "overlap/step_ms": 1e3 * seconds / steps,
        "overlap/worker_busy_percent": 100 * (now.worker_busy_s - before.worker_busy_s) / seconds,
        "overlap/update_interval_steps": now.update_interval,
        "overlap/publish_lag_steps": now.publish_lag,
        "overlap/late_blocks_percent": 100 * (now.late_jobs - before.late_jobs) / in_backward if in_backward else None,
        "overlap/clip_prediction_error_percent": _percent(now.factor_error),
        "overlap/steps_in_backward_percent": 100 * (now.steps_in_backward - before.steps_in_backward) / steps,
        "overlap/corrected_steps_percent": 100 * (now.corrected_steps - before.corrected_steps) / steps,
        "traffic/d2h_model_sizes": (now.d2h_bytes - before.d2h_bytes) / model_bytes,
        "traffic/h2d_model_sizes": (now.h2d_bytes - before.h2d_bytes) / model_bytes,
        "selection/device_owned_percent": 100 * now.owned_share,
        "selection/device_squared_norm_percent": _percent(now.owned_norm_share),
        "memory/arena_GB": now.arena_bytes / 1e9,
        "memory/device_peak_GB": now.device_peak_bytes / 1e9,
    }
    return {f"zenflow/{name}": float(value) for name, value in metrics.items() if value is not None}


def _percent(share: float | None) -> float | None:
    return None if share is None or not math.isfinite(share) else 100 * share


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
        self._last_read = self._before = optimizer.counters.read()
        self._pause_ns: int | None = None
        self.end_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        """Takes the time of a step."""
        self.resume()
        now_ns = time.perf_counter_ns()
        self.step_s.append(1e-9 * (now_ns - self.end_ns))
        self.end_ns = now_ns
        if len(self.step_s) == 1:
            # The summary averages over the steps behind the first.
            self._before = self._optimizer.counters.read()

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
        now = self._optimizer.counters.read()
        if now.steps == self._last_read.steps:
            return {}
        before, self._last_read = self._last_read, now
        seconds = sum(self.step_s[self._n_read :])
        self._n_read = len(self.step_s)
        return interval_metrics(before, self._last_read, seconds=seconds)

    def summary(self) -> str | None:
        """Times, waits and advice; None before the second step."""
        if len(self.step_s) < 2:
            return None
        now, config = self._optimizer.counters.read(), self._optimizer.zenflow_config
        fp16 = self._optimizer.parts.rank.dtype == torch.float16
        return summary(self.step_s[1:], self._before, now, config, fp16=fp16)

    def _ns_without_waits(self) -> int:
        return time.perf_counter_ns() - round(1e9 * sum(self._optimizer.telemetry.seconds.values()))


def summary(step_s: Sequence[float], before: Reading, now: Reading, config: ZenFlowConfig, *, fp16: bool) -> str:
    """Formats the summary and, where something limits, the advice.

    Args:
        step_s: duration of each step but the first, which compiles and allocates memory; one or more.
        before: reading after the first step.
        now: reading after the last step.
        config: of the training.
        fp16: whether the model's type is float16.
    """
    n, seconds = len(step_s), sum(step_s)
    host = sum(difference(now.host_stall_s, before.host_stall_s).values())
    device = difference(now.device_stall_s, before.device_stall_s)
    busy_s = now.worker_busy_s - before.worker_busy_s
    model_bytes = n * max(now.model_bytes, 1)
    d2h, h2d = (now.d2h_bytes - before.d2h_bytes) / model_bytes, (now.h2d_bytes - before.h2d_bytes) / model_bytes
    waits = {cause: s / seconds for cause, s in device.items()}
    work = f"CPU work {_ms(busy_s / n)} ms a step"
    waited_s = sum(device[cause] for cause in (*_WORKER, "flush"))
    # A low share of little work would sound like a fault.
    if busy_s > _SHOWN * seconds and (waited_s < _FEW * busy_s or waited_s >= SMALL_STALL * seconds):
        work += f", {max(0.0, 1.0 - waited_s / busy_s):.0%} hidden"
    details = [
        work,
        f"copies a step: d2h {d2h:.2f}, h2d {h2d:.2f} model sizes",
        f"update_interval={now.update_interval}, publish_lag={now.publish_lag}",
    ]
    in_backward = now.in_backward_jobs - before.in_backward_jobs
    if in_backward and sum(waits.values()) > _SHOWN:
        details.append(f"{(now.late_jobs - before.late_jobs) / in_backward:.1%} of the blocks late")
    corrected = now.corrected_steps - before.corrected_steps
    in_time = now.steps_in_backward - before.steps_in_backward - corrected
    speculates = config.submits_in_backward and not config.predicts_clipping and now.publish_lag == 0
    if speculates:
        details.append(f"update in backward in {in_time / n:.1%} of the steps, corrected in {corrected / n:.1%}")
    lines = [
        f"ZenFlow: {n + 1} steps, median {_ms(quantile(step_s, 0.5))} ms, p99 {_ms(quantile(step_s, 0.99))} ms;"
        f" waits of the device {sum(waits.values()):.1%}, of the training thread {host / seconds:.1%}",
        "; ".join(details),
    ]
    skipped = (now.skipped_steps - before.skipped_steps) / n
    at_most = config.update_interval == "auto" and now.update_interval >= config.max_update_interval
    sentence = advice(
        waits,
        config,
        worker=busy_s / seconds,
        skipped=skipped,
        at_end=1.0 - in_time / n if speculates else 0.0,
        longest=at_most,
        fp16=fp16,
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
    longest: bool = False,
    fp16: bool = False,
) -> str | None:
    """The largest limit that the user can do something about, and its remedy, in a sentence; None if waits are negligible.

    Args:
        waits: of the device, by cause (`CAUSES`), as shares of the time.
        config: what is `auto` is not advised.
        worker: the worker's computation, as a share of the time.
        skipped: share of the steps that were skipped because the gradient norm was not finite.
        at_end: share of the steps whose update began at their end, at least for a part of the weights, because of clipping.
        longest: whether `update_interval: auto` has reached `max_update_interval`.
        fp16: whether the model's type is float16.
    """
    if skipped > _MANY_SKIPPED:
        otherwise = " or train in bf16" if fp16 else ", or look for NaN in the loss"
        return f"{skipped:.0%} of the steps were skipped because their gradient was not finite: lower the learning rate{otherwise}."
    for cause, share in sorted(waits.items(), key=lambda item: item[1], reverse=True):
        if share < SMALL_STALL:
            break
        if cause in _WORKER and at_end > _MANY_AT_END:
            return (
                f"{share:.0%} of the time is spent waiting for the CPU, because gradients were clipped in about {at_end:.0%} of the steps,"
                " whose update begins when the norm is known: raise gradient_clip_val, or allow predicted factors (clip_prediction=True,"
                ' or strategy="zenflow").'
            )
        if cause in _WORKER:
            load = worker / max(1.0 - sum(waits.values()), 1e-9)
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
        if cause in _REMEDIES:
            return f"{share:.0%} of the time is spent {_REMEDIES[cause]}."
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
