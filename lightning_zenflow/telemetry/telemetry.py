"""Clocks and byte counts of one rank, and a snapshot of all its counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from typing_extensions import Self

from lightning_zenflow.telemetry.stalls import StallClock


@dataclass(kw_only=True)
class Traffic:
    """Bytes copied by one rank since the start. On a CPU device: bytes that would cross PCIe beside a GPU."""

    d2h_bytes: int = 0
    """Device to host: gradients, their sums over micro-batches, clip factors and step numbers, state of device-owned entries."""
    h2d_bytes: int = 0
    """Host to device: published weights, sums over micro-batches, gradients that are reapplied after a publish, state of device-owned
    entries."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Clocks and byte counts of one rank, passed to every component that waits, works or copies.

    The record is frozen, its members are not: the training thread writes to them, and monitors read them between steps.
    """

    stalls: StallClock
    """Time that the training thread and the device spent waiting, by cause."""
    traffic: Traffic = field(default_factory=Traffic)
    """Bytes copied between device and host."""

    @classmethod
    def create(cls, device: torch.device) -> Self:
        """Builds the telemetry of a rank; on a CUDA device, times are measured with events on the current stream."""
        return cls(stalls=StallClock(device))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Snapshot of a rank's counters. Fields in `_s`, traffic and counts are totals since the start."""

    steps: int
    host_stall_s: Mapping[str, float]
    """By cause (`stalls.CAUSES`). Causes that have not occurred may be missing."""
    device_stall_s: Mapping[str, float]
    worker_busy_s: float
    worker_restarts: int
    skipped_steps: int
    d2h_bytes: int
    h2d_bytes: int
    model_bytes: int
    """Size of the rank's weights in the model's dtype."""
    in_backward_jobs: int
    """Jobs that were submitted in backward."""
    late_jobs: int
    """Those of them that were not done when the training thread waited for them."""
    factor_error: float | None
    """Mean relative error of a step's predicted clip factors; None until measured."""
    update_interval: int
    publish_lag: int
    owned_share: float
    """Device-owned share of the weights, 0 to 1."""
    owned_norm_share: float | None
    """Share of the gradient's squared norm in device-owned columns, 0 to 1; None until measured."""
    arena_bytes: int
    device_peak_bytes: int
