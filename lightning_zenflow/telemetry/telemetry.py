"""All telemetry of one rank as one record."""

from dataclasses import dataclass, field

import torch
from typing_extensions import Self

from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.stalls import StallClock


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
