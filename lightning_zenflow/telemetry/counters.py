"""What was copied between the device and host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.native import protocol


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The worker's acknowledgement of one job."""

    job_id: int
    start_ns: int
    """Receipt of the job, by the monotonic clock (`time.perf_counter_ns`)."""
    wait_ns: int
    """Wait for the job's data, in nanoseconds."""
    busy_ns: int
    """Computation, in nanoseconds."""
    threads: Sequence[protocol.ThreadSpan]
    """Working times of the threads that had a share of the job, in order of the worker's cores."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All counters of a rank at one moment. What ends in `_s`, `_bytes` (of traffic) and counts are sums since the start."""

    steps: int
    host_stall_s: Mapping[str, float]
    """By cause, as `stalls.CAUSES`; causes that never occurred may be missing."""
    device_stall_s: Mapping[str, float]
    worker_busy_s: float
    worker_restarts: int
    skipped_steps: int
    d2h_bytes: int
    h2d_bytes: int
    model_bytes: int
    """Bytes of the rank's weights in the model's type."""
    gradients: int
    """Gradients of blocks that have become visible."""
    age_steps: int
    """Sum of their ages."""
    update_interval: int
    publish_lag: int
    prediction_steps: float
    owned_share: float
    owned_norm_share: float | None
    selections: int
    selection_overlap: float | None
    trainer_rss_bytes: int
    worker_rss_bytes: int
    arena_bytes: int
    device_bytes: int
    device_peak_bytes: int


@dataclass(kw_only=True)
class Traffic:
    """Bytes since the start, of one rank; they only grow. On a CPU they are those that would cross PCIe beside a GPU.

    Whoever copies counts: `JobQueue`, `GradientRouter`, `HostAccumulation`, `ReapplyAfterPublish` and `Ownership`.
    """

    d2h_bytes: int = 0
    """Device to host: gradients, their sums over micro-batches, factors and step numbers, state of device-owned entries."""
    h2d_bytes: int = 0
    """Host to device: published weights, sums over micro-batches, gradients of repeated moves, state of device-owned entries."""


class AsyncHostCopy:
    """A copy of a device tensor on its way to host memory, behind the device's work so far.

    Args:
        values: on the device; may be changed afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._values.copy_(values, non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if on_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """The values, on the CPU. Waits for those that have not arrived."""
        if self._arrived is not None and not self.arrived:
            self._arrived.synchronize()
        return self._values
