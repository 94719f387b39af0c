"""Everything that is counted in one rank, read from its parts at one moment."""

import psutil
import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.telemetry.counters import AsyncHostCopy, Reading, Traffic
from lightning_zenflow.telemetry.stalls import StallClock
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.worker.arena import Arena


class CounterReader:
    """Never waits for the device: its values are copied to the host in stream order and read at a later call.

    Args:
        partition: the rank's partition.
        arena: whose size belongs to it.
        jobs: whose counts belong to it.
        traffic: likewise.
        ownership: says how much the device owns.
        planner: whose selector belongs to it.
        stalls: whose times belong to it.
        skipped: 0-D int64 on the device, steps that changed nothing.
        device: what trains.
    """

    def __init__(
        self,
        partition: Partition,
        *,
        arena: Arena,
        jobs: JobQueue,
        traffic: Traffic,
        ownership: Ownership,
        planner: Planner,
        stalls: StallClock,
        skipped: Tensor,
        device: torch.device,
    ) -> None:
        self._numel = sum(s.numel for s in partition.slices)
        self._arena = arena
        self._jobs = jobs
        self._traffic = traffic
        self._ownership = ownership
        self._planner = planner
        self._stalls = stalls
        self._skipped = skipped
        self._device = device
        self._late_skipped: AsyncHostCopy | None = None
        self._late_owned_share: AsyncHostCopy | None = None
        self._n_skipped = 0
        self._owned_share: float | None = None

    def note_owned_share(self, share: Tensor) -> None:
        """Takes the share of the gradient's energy in device-owned columns: 0-D float32 on the device."""
        self._late_owned_share = AsyncHostCopy(share)

    def read(self, *, worker_pid: int | None) -> Reading:
        """The present numbers; those that live on the device are from an earlier step.

        Args:
            worker_pid: process number of the worker, for its memory; None: it is gone.
        """
        self._read_late()
        counts, selector, schedule = self._jobs.counts, self._planner.selector, self._jobs.schedule
        on_cuda = self._device.type == "cuda"
        return Reading(
            steps=self._stalls.steps,
            host_stall_s=self._stalls.seconds,
            device_stall_s=self._stalls.device_seconds,
            worker_busy_s=self._stalls.worker_busy_s,
            worker_restarts=self._stalls.worker_restarts,
            skipped_steps=self._n_skipped,
            d2h_bytes=self._traffic.d2h_bytes,
            h2d_bytes=self._traffic.h2d_bytes,
            model_bytes=self._numel * self._arena.slots.element_size(),
            gradients=counts.gradients,
            age_steps=counts.age_steps,
            update_interval=schedule.update_interval,
            publish_lag=schedule.publish_lag,
            prediction_steps=self._jobs.prediction_steps,
            owned_share=self._ownership.numel / self._numel if self._numel else 0.0,
            owned_norm_share=self._owned_share,
            selections=selector.n_selections,
            selection_overlap=selector.last_overlap,
            trainer_rss_bytes=psutil.Process().memory_info().rss,
            worker_rss_bytes=_rss(worker_pid),
            arena_bytes=self._arena.reserved_bytes,
            device_bytes=torch.cuda.memory_allocated(self._device) if on_cuda else 0,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else 0,
        )

    def _read_late(self) -> None:
        if self._late_owned_share is not None and self._late_owned_share.arrived:
            self._owned_share, self._late_owned_share = float(self._late_owned_share.read()), None
        before, self._late_skipped = self._late_skipped, AsyncHostCopy(self._skipped)
        for late in (before, self._late_skipped):
            if late is not None and late.arrived:
                self._n_skipped = int(late.read())


def _rss(pid: int | None) -> int:
    """Resident memory of a process in bytes; 0 if there is none."""
    if pid is None:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
