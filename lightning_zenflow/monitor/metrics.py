"""What `StallMonitor` logs: every metric by name, and how it follows from two readings of the counters. Pure Python.

docs/metrics.md has the same table for readers; a test compares both with what is really logged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zenflow.telemetry.counters import Reading
from lightning_zenflow.telemetry.stalls import CAUSES

METRICS: dict[str, str] = {
    "zenflow/stall/host_ms": "the training thread waited, per step",
    "zenflow/stall/host_percent": "share of a step's time that this was",
    "zenflow/stall/device_ms": "the device had nothing to do because of waiting, per step",
    "zenflow/stall/device_percent": "share of a step's time that this was",
    **{f"zenflow/stall/host_{cause}_ms": f"the training thread's waiting, cause `{cause}`" for cause in CAUSES},
    **{f"zenflow/stall/device_{cause}_ms": f"the device's waiting, cause `{cause}`" for cause in CAUSES},
    "zenflow/stall/device_copy_ms": "copying published weights to the model after backward, which nothing hides; of one step",
    "zenflow/stall/skipped_steps": "steps since the start that changed nothing, their gradient norm not being finite",
    "zenflow/stall/worker_restarts": "times since the start that a new worker took over from a dead one",
    "zenflow/overlap/step_ms": "time of a step, waiting included, without validation",
    "zenflow/overlap/worker_busy_ms": "the worker computed, per step",
    "zenflow/overlap/worker_busy_percent": "share of a step's time that this was",
    "zenflow/overlap/hidden_percent": "share of the worker's time for which the device did not wait",
    "zenflow/overlap/update_interval_steps": "S",
    "zenflow/overlap/publish_lag_steps": "d",
    "zenflow/overlap/weight_prediction_steps": "how far published weights run ahead of the exact ones",
    "zenflow/overlap/staleness_steps": "age at which host-owned gradients became visible in the model, on average; 0: in their own step",
    "zenflow/traffic/d2h_bytes": "device to host, per step",
    "zenflow/traffic/h2d_bytes": "host to device, per step",
    "zenflow/traffic/d2h_model_sizes": "the same over the bytes of this rank's weights",
    "zenflow/traffic/h2d_model_sizes": "likewise",
    "zenflow/traffic/d2h_GB_per_s": "speed of copying gradients (PCIe), with their sums, which the same pass takes; of one step",
    "zenflow/traffic/h2d_GB_per_s": "speed of copying published weights, of one step",
    "zenflow/selection/device_owned_percent": "share of the weights that the device owns",
    "zenflow/selection/device_squared_norm_percent": "share of the gradient's energy (sum of squares, matrices) in device-owned columns",
    "zenflow/selection/overlap_percent": "share of the columns chosen last that were chosen before as well",
    "zenflow/selection/selections": "selections since the start",
    "zenflow/memory/trainer_GB": "resident memory of the training process, what it touched of the arena included",
    "zenflow/memory/worker_GB": "resident memory of the worker process, likewise",
    "zenflow/memory/arena_GB": "shared host memory reserved",
    "zenflow/memory/device_GB": "allocated on the CUDA device by torch; 0 without one",
    "zenflow/memory/device_peak_GB": "most that was allocated there",
}
"""Metric -> meaning. Milliseconds, percent, bytes, 1e9 bytes (GB), steps; a number without a unit is a count."""


@dataclass(frozen=True, kw_only=True)
class CopySample:
    """Bytes and seconds of one step's copies."""

    down: tuple[int, float]
    up: tuple[int, float]
    exposed_h2d_s: float
    """What of `up` is copied between the device's computations, not in backward beside them."""


def hidden_share(worker_busy_s: float, device_stall_s: Mapping[str, float]) -> float:
    """Share of the worker's time for which the device did not wait; 1 if the worker did nothing."""
    waited = sum(device_stall_s.get(cause, 0.0) for cause in ("publish_wait", "flush"))
    return max(0.0, 1.0 - waited / worker_busy_s) if worker_busy_s > 0 else 1.0


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds by cause between two readings; every cause is there."""
    return {cause: now.get(cause, 0.0) - before.get(cause, 0.0) for cause in CAUSES}


def interval_metrics(before: Reading, now: Reading, *, seconds: float, copies: CopySample | None) -> dict[str, float]:
    """The metrics of the steps between two readings.

    Args:
        before: the earlier reading.
        now: the later one, at least a step later.
        seconds: time of these steps.
        copies: of one of the last steps; None if not known.

    Returns:
        Keys of `METRICS`; those are missing that are not known yet.
    """
    steps = now.steps - before.steps
    assert steps > 0 and seconds > 0
    host, device = (
        difference(now.host_stall_s, before.host_stall_s),
        difference(now.device_stall_s, before.device_stall_s),
    )
    busy_s = now.worker_busy_s - before.worker_busy_s
    gradients = now.gradients - before.gradients
    down, up = (now.d2h_bytes - before.d2h_bytes) / steps, (now.h2d_bytes - before.h2d_bytes) / steps
    model_bytes = max(now.model_bytes, 1)
    optional = {
        "stall/device_copy_ms": 1e3 * copies.exposed_h2d_s if copies else None,
        "overlap/staleness_steps": (now.age_steps - before.age_steps) / gradients if gradients else None,
        "traffic/d2h_GB_per_s": _speed(*copies.down) if copies else None,
        "traffic/h2d_GB_per_s": _speed(*copies.up) if copies else None,
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
        "overlap/weight_prediction_steps": now.prediction_steps,
        "traffic/d2h_bytes": down,
        "traffic/h2d_bytes": up,
        "traffic/d2h_model_sizes": down / model_bytes,
        "traffic/h2d_model_sizes": up / model_bytes,
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


def _speed(n_bytes: int, seconds: float) -> float | None:
    return n_bytes / seconds / 1e9 if n_bytes > 0 and seconds > 0 else None


def _percent(share: float | None) -> float | None:
    return None if share is None or not math.isfinite(share) else 100 * share
