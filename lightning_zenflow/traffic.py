"""What was copied between the device and host memory."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Traffic:
    """Bytes since the start, of one rank; they only grow. On a CPU they are those that would cross PCIe beside a GPU.

    Whoever copies counts: `Rounds`, `GradientIntake`, `HostAccumulation`, `RepeatedMoves` and `Ownership`.
    """

    down_bytes: int = 0
    """Device to host: gradients, their sums over micro-batches, factors and step numbers, state of device-owned entries."""
    up_bytes: int = 0
    """Host to device: published weights, sums over micro-batches, gradients of repeated moves, state of device-owned entries."""
