"""Metrics of `StallMonitor`: their names, and their values between two readings of the counters. Pure Python.

docs/tuning.md repeats `METRICS`; a test compares both with what a training logs.
"""

import math
from collections.abc import Mapping

from lightning_zenflow.telemetry.telemetry import CAUSES, Cause, Reading

_WAITS: dict[str, tuple[Cause, ...]] = {
    "worker": ("publish_wait", "slot"),
    "buffer": ("publish_buffer",),
    "select": ("select",),
    "flush": ("flush",),
    "other": ("restart", "reserve", "loss_scale"),
}
"""Waits of the device that have a metric, by the causes that it adds up; each cause in one."""

METRICS: dict[str, str] = {
    "zenflow/stall/device_percent": "share of the step time in which the device was idle because of waits",
    "zenflow/stall/host_percent": "share of the step time in which the training thread waited",
    "zenflow/stall/worker_percent": "part of `device_percent`: the worker's results were not ready, or no slot or buffer was free",
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
    "zenflow/overlap/clip_prediction_error_percent": "mean error of the clip factors predicted in backward; of one step",
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
    """Computes the metrics of the steps between two readings.

    Args:
        before: first reading.
        now: second reading, at least one step later.
        seconds: duration of these steps, > 0.

    Returns:
        Values by name in `METRICS`. Metrics that are not known yet are missing.
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
