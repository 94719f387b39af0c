"""Everything that is counted in one rank, read from its parts at one moment."""

import psutil
import torch
from torch import Tensor

from lightning_zenflow.arena import Arena
from lightning_zenflow.late import LateValues
from lightning_zenflow.metrics import Reading
from lightning_zenflow.ownership import Ownership
from lightning_zenflow.partition import Partition
from lightning_zenflow.planner import Planner
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.stalls import StallClock
from lightning_zenflow.traffic import Traffic


class Gauges:
    """Never waits for the device: its values are copied to the host in stream order and read at a later call.

    Args:
        partition: the rank's partition.
        arena: whose size belongs to it.
        rounds: whose counts belong to it.
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
        rounds: Rounds,
        traffic: Traffic,
        ownership: Ownership,
        planner: Planner,
        stalls: StallClock,
        skipped: Tensor,
        device: torch.device,
    ) -> None:
        self._numel = sum(s.numel for s in partition.slices)
        self._arena = arena
        self._rounds = rounds
        self._traffic = traffic
        self._ownership = ownership
        self._planner = planner
        self._stalls = stalls
        self._skipped = skipped
        self._device = device
        self._late_skipped: LateValues | None = None
        self._late_energy: LateValues | None = None
        self._n_skipped = 0
        self._energy: float | None = None

    def note_energy(self, share: Tensor) -> None:
        """Takes the share of the gradient's energy in device-owned columns: 0-D float32 on the device."""
        self._late_energy = LateValues(share)

    def read(self, *, worker_pid: int | None) -> Reading:
        """The present numbers; those that live on the device are from an earlier step.

        Args:
            worker_pid: process number of the worker, for its memory; None: it is gone.
        """
        self._read_late()
        counts, selector, pace = self._rounds.counts, self._planner.selector, self._rounds.pace
        on_cuda = self._device.type == "cuda"
        return Reading(
            steps=self._stalls.steps,
            host_stall_s=self._stalls.seconds,
            device_stall_s=self._stalls.device_seconds,
            worker_busy_s=self._stalls.worker_busy_s,
            worker_restarts=self._stalls.worker_restarts,
            skipped_steps=self._n_skipped,
            down_bytes=self._traffic.down_bytes,
            up_bytes=self._traffic.up_bytes,
            model_bytes=self._numel * self._arena.pages.element_size(),
            gradients=counts.gradients,
            age_steps=counts.age_steps,
            update_interval=pace.update_interval,
            publish_lag=pace.publish_lag,
            look_ahead=self._rounds.look_ahead,
            owned_share=self._ownership.numel / self._numel if self._numel else 0.0,
            owned_energy=self._energy,
            selections=selector.n_selections,
            selection_overlap=selector.last_overlap,
            trainer_rss_bytes=psutil.Process().memory_info().rss,
            worker_rss_bytes=_rss(worker_pid),
            arena_bytes=self._arena.reserved_bytes,
            device_bytes=torch.cuda.memory_allocated(self._device) if on_cuda else 0,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else 0,
        )

    def _read_late(self) -> None:
        if self._late_energy is not None and self._late_energy.arrived:
            self._energy, self._late_energy = float(self._late_energy.read()), None
        before, self._late_skipped = self._late_skipped, LateValues(self._skipped)
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
