"""Reading of all counters of one rank at one moment."""

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zenflow.core.device import DeviceNumber, runtime_of
from lightning_zenflow.offload.arrivals import BackwardSubmission
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.ownership import Ownership
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.telemetry.telemetry import Reading

_WATCHED = 16
"""Steps that are looked at one by one, and then the interval between two looks."""


class CounterReader:
    """Reads the counters without waiting for the device: device values are copied asynchronously and read at a later call.

    Attributes:
        owned_norm_share: share of the squared norm of the gradient that lies in device-owned columns, copied where it is measured.
    """

    def __init__(
        self, rank: RankState, jobs: JobQueue, in_backward: BackwardSubmission, ownership: Ownership, *, skipped: Tensor
    ) -> None:
        self._rank = rank
        self._numel = sum(s.numel for s in rank.partition.slices)
        self._jobs = jobs
        self._in_backward = in_backward
        self._ownership = ownership
        self._skipped = skipped
        self._n_skipped = DeviceNumber()
        self._has_warned = False
        self.owned_norm_share = DeviceNumber()

    def warn_of_skipped(self, step: int) -> None:
        """Warns once, soon after the first step that changed nothing; not to be called where a loss scale is searched for."""
        if self._has_warned or (step > _WATCHED and step % _WATCHED):
            return
        self._n_skipped.copy(self._skipped)
        if n := int(self._n_skipped.read() or 0):
            self._has_warned = True
            rank_zero_warn(
                f"ZenFlow: {n} of {step} steps so far were skipped, as their gradient was not finite: they changed no weight. Look for"
                " NaN in batches and loss, or lower the learning rate"
            )

    def read(self) -> Reading:
        """Present values; those of the device are from an earlier step."""
        self._n_skipped.copy(self._skipped)
        runtime, telemetry = runtime_of(self._rank.device), self._rank.telemetry
        jobs, schedule = self._jobs.in_flight, self._jobs.schedule
        return Reading(
            steps=telemetry.stalls.steps,
            host_stall_s=telemetry.stalls.seconds,
            device_stall_s=telemetry.stalls.device_seconds,
            worker_busy_s=telemetry.stalls.worker_busy_s,
            worker_restarts=telemetry.stalls.worker_restarts,
            skipped_steps=int(self._n_skipped.read() or 0),
            d2h_bytes=telemetry.traffic.d2h_bytes,
            h2d_bytes=telemetry.traffic.h2d_bytes,
            model_bytes=self._numel * self._rank.dtype.itemsize,
            in_backward_jobs=jobs.n_in_backward,
            late_jobs=jobs.n_late,
            factor_error=self._in_backward.factor_error.read(),
            update_interval=schedule.update_interval,
            publish_lag=schedule.publish_lag,
            owned_share=self._ownership.numel / self._numel if self._numel else 0.0,
            owned_norm_share=self.owned_norm_share.read() if self._ownership.numel else None,
            arena_bytes=self._rank.arena.reserved_bytes,
            device_peak_bytes=runtime.max_memory_allocated(),
        )
