"""Metrics of `StallMonitor`: their names, and their values between two readings of the counters. Pure Python.

docs/metrics.md repeats `METRICS`; a test compares both with what a training logs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zenflow.telemetry.counters import Reading
from lightning_zenflow.telemetry.stalls import CAUSES

METRICS: dict[str, str] = {
    "zenflow/stall/host_ms": "waits of the training thread, per step",
    "zenflow/stall/host_percent": "the same as a share of the step time",
    "zenflow/stall/device_ms": "idle time of the device caused by waits, per step",
    "zenflow/stall/device_percent": "the same as a share of the step time",
    **{f"zenflow/stall/host_{cause}_ms": f"waits of the training thread, cause `{cause}`" for cause in CAUSES},
    **{f"zenflow/stall/device_{cause}_ms": f"idle time of the device, cause `{cause}`" for cause in CAUSES},
    "zenflow/stall/device_copy_ms": "exposed copies of published weights, after backward; of one step",
    "zenflow/stall/skipped_steps": "steps without an update since the start, because the gradient norm was not finite",
    "zenflow/stall/worker_restarts": "restarts of a killed worker since the start",
    "zenflow/overlap/step_ms": "step time, waits included, validation excluded",
    "zenflow/overlap/worker_busy_ms": "computation of the worker, per step",
    "zenflow/overlap/worker_busy_percent": "the same as a share of the step time",
    "zenflow/overlap/hidden_percent": "share of the worker's computation that the device did not wait for",
    "zenflow/overlap/update_interval_steps": "S",
    "zenflow/overlap/publish_lag_steps": "d",
    "zenflow/overlap/tail_percent": "share of the blocks in the tail, which arrive last and are owned by the device",
    "zenflow/overlap/weight_prediction_steps": "steps by which published weights are extrapolated beyond the exact ones",
    "zenflow/overlap/late_blocks_percent": "share of the blocks submitted in backward that were not updated when the training thread"
    " ended the step; on CUDA the device is behind it",
    "zenflow/overlap/clip_prediction_error_percent": "mean error of the clip factors predicted in backward; of one step",
    "zenflow/overlap/staleness_steps": "mean age of host-owned gradients when they become visible in the model; 0: in their own step",
    "zenflow/traffic/d2h_bytes": "device to host, per step",
    "zenflow/traffic/h2d_bytes": "host to device, per step",
    "zenflow/traffic/d2h_model_sizes": "device to host, per step, in sizes of this rank's weights",
    "zenflow/traffic/h2d_model_sizes": "host to device, per step, in sizes of this rank's weights",
    "zenflow/traffic/d2h_GB_per_s": "rate of gradient copies (PCIe), squared norms of the same pass included; of one step",
    "zenflow/traffic/h2d_GB_per_s": "rate of copies of published weights; of one step",
    "zenflow/selection/device_owned_percent": "device-owned share of the weights",
    "zenflow/selection/device_squared_norm_percent": "share of the squared norm of the matrices' gradients in device-owned columns",
    "zenflow/selection/overlap_percent": "share of the last selected columns that were selected before",
    "zenflow/selection/selections": "selections since the start",
    "zenflow/memory/trainer_GB": "resident memory of the training process, touched pages of the arena included",
    "zenflow/memory/worker_GB": "resident memory of the worker process, touched pages of the arena included",
    "zenflow/memory/arena_GB": "reserved shared host memory",
    "zenflow/memory/device_GB": "CUDA memory allocated by torch; 0 on a CPU device",
    "zenflow/memory/device_peak_GB": "peak of the same",
}
"""Metric -> meaning. Milliseconds, percent, bytes, 1e9 bytes (GB), steps; a metric without a unit is a count."""


@dataclass(frozen=True, kw_only=True)
class CopySample:
    """Copies of one step: (bytes, seconds) in each direction."""

    d2h: tuple[int, float]
    h2d: tuple[int, float]
    exposed_h2d_s: float
    """Part of the seconds of `h2d` that no computation hides."""


def hidden_share(worker_busy_s: float, device_stall_s: Mapping[str, float]) -> float:
    """Share of the worker's computation that the device did not wait for, 0 to 1; 1 for an idle worker."""
    waited = sum(device_stall_s.get(cause, 0.0) for cause in ("publish_wait", "slot", "flush"))
    return max(0.0, 1.0 - waited / worker_busy_s) if worker_busy_s > 0 else 1.0


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds between two readings, for every cause."""
    return {cause: now.get(cause, 0.0) - before.get(cause, 0.0) for cause in CAUSES}


def interval_metrics(before: Reading, now: Reading, *, seconds: float, copies: CopySample | None) -> dict[str, float]:
    """Computes the metrics of the steps between two readings.

    Args:
        before: first reading.
        now: second reading, at least one step later.
        seconds: duration of these steps, > 0.
        copies: copies of a recent step; None if unknown.

    Returns:
        Values by name in `METRICS`. Metrics that are not known yet are missing.
    """
    steps = now.steps - before.steps
    assert steps > 0 and seconds > 0
    host = difference(now.host_stall_s, before.host_stall_s)
    device = difference(now.device_stall_s, before.device_stall_s)
    busy_s = now.worker_busy_s - before.worker_busy_s
    gradients = now.gradients - before.gradients
    in_backward = now.in_backward_jobs - before.in_backward_jobs
    d2h_bytes = (now.d2h_bytes - before.d2h_bytes) / steps
    h2d_bytes = (now.h2d_bytes - before.h2d_bytes) / steps
    model_bytes = max(now.model_bytes, 1)
    optional = {
        "stall/device_copy_ms": 1e3 * copies.exposed_h2d_s if copies else None,
        "overlap/late_blocks_percent": 100 * (now.late_jobs - before.late_jobs) / in_backward if in_backward else None,
        "overlap/clip_prediction_error_percent": _percent(now.factor_error),
        "overlap/staleness_steps": (now.age_steps - before.age_steps) / gradients if gradients else None,
        "traffic/d2h_GB_per_s": _gb_per_s(*copies.d2h) if copies else None,
        "traffic/h2d_GB_per_s": _gb_per_s(*copies.h2d) if copies else None,
        "selection/device_squared_norm_percent": _percent(now.owned_norm_share),
        "selection/overlap_percent": _percent(now.selection_overlap),
    }
    metrics = {
        "stall/host_ms": 1e3 * sum(host.values()) / steps,
        "stall/host_percent": 100 * sum(host.values()) / seconds,
        "stall/device_ms": 1e3 * sum(device.values()) / steps,
        "stall/device_percent": 100 * sum(device.values()) / seconds,
        **{f"stall/host_{cause}_ms": 1e3 * s / steps for cause, s in host.items()},
        **{f"stall/device_{cause}_ms": 1e3 * s / steps for cause, s in device.items()},
        "stall/skipped_steps": now.skipped_steps,
        "stall/worker_restarts": now.worker_restarts,
        "overlap/step_ms": 1e3 * seconds / steps,
        "overlap/worker_busy_ms": 1e3 * busy_s / steps,
        "overlap/worker_busy_percent": 100 * busy_s / seconds,
        "overlap/hidden_percent": 100 * hidden_share(busy_s, device),
        "overlap/update_interval_steps": now.update_interval,
        "overlap/publish_lag_steps": now.publish_lag,
        "overlap/tail_percent": 100 * now.tail_share,
        "overlap/weight_prediction_steps": now.prediction_steps,
        "traffic/d2h_bytes": d2h_bytes,
        "traffic/h2d_bytes": h2d_bytes,
        "traffic/d2h_model_sizes": d2h_bytes / model_bytes,
        "traffic/h2d_model_sizes": h2d_bytes / model_bytes,
        "selection/device_owned_percent": 100 * now.owned_share,
        "selection/selections": now.selections,
        "memory/trainer_GB": now.trainer_rss_bytes / 1e9,
        "memory/worker_GB": now.worker_rss_bytes / 1e9,
        "memory/arena_GB": now.arena_bytes / 1e9,
        "memory/device_GB": now.device_bytes / 1e9,
        "memory/device_peak_GB": now.device_peak_bytes / 1e9,
    }
    known = {name: value for name, value in optional.items() if value is not None}
    return {f"zenflow/{name}": float(value) for name, value in {**metrics, **known}.items()}


def _gb_per_s(n_bytes: int, seconds: float) -> float | None:
    return n_bytes / seconds / 1e9 if n_bytes > 0 and seconds > 0 else None


def _percent(share: float | None) -> float | None:
    return None if share is None or not math.isfinite(share) else 100 * share
