"""Sums of gradients over the micro-batches of a step, but for the last one's."""

import logging
from typing import Literal

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import RankState

_log = logging.getLogger(__name__)


class Accumulation:
    """Owner of the gradients of micro-batches that are not their step's last.

    Sums are in device memory, as much as the rank's part of the gradients; or in the slots that the step's gradients go to in the end. Then
    the device needs memory for the largest slice only, and each sum crosses PCIe both ways, in stream order; the host does not wait. Sums
    are rounded to the model's type after each micro-batch: the same bits wherever they are.

    Args:
        jobs: with sums on the host, a block acquires its slot at the first micro-batch, before phase *open*.
        where: `ZenFlowConfig.accumulate_on`. "auto" is decided at the first micro-batch, when the device's memory has been as full as it
            gets.

    Attributes:
        pending: slices with a sum that has not been taken.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, *, where: Literal["auto", "device", "host"]) -> None:
        self._rank = rank
        self._jobs = jobs
        self._where = where
        self._on_device: Tensor | None = None  # [partition.numel], model dtype
        self.pending: set[int] = set()

    def add(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Adds a gradient of a micro-batch that is not the step's last, as `ZenFlowStep.receive` takes it."""
        if self._where == "auto":
            n_bytes = self._rank.partition.numel * self._rank.dtype.itemsize
            self._where = "device" if runtime_of(self._rank.device).has_room(n_bytes) else "host"
            _log.info("ZenFlow: accumulate_on='auto': gradients are accumulated on the %s", self._where)
        if self._where == "host":
            if slice_index in self.pending:
                gradient.add_(self.sum(slice_index))
            else:
                self._jobs.acquire(self._rank.blocks.of_slice[slice_index], step)
            for begin, slot in self._jobs.slots.views_of_slice(slice_index):
                slot.copy_(gradient.narrow(0, begin, slot.numel()), non_blocking=True)
                self._rank.telemetry.d2h_bytes += slot.nbytes
        elif slice_index in self.pending:
            self.sum(slice_index).add_(gradient)
        else:
            self.sum(slice_index).copy_(gradient)
        self.pending.add(slice_index)

    def take(self, slice_index: int) -> Tensor:
        """A pending sum, which is no longer pending: [slice.numel], model dtype, on the device."""
        total = self.sum(slice_index)
        self.pending.remove(slice_index)
        return total

    def release(self) -> Tensor | None:
        """Frees the device memory of the sums where none is pending; where some are, returns it."""
        if not self.pending:
            self._on_device = None
        return self._on_device

    def sum(self, slice_index: int) -> Tensor:
        """A sum, [slice.numel], model dtype, on the device; not initialised before the first gradient."""
        rank, s = self._rank, self._rank.partition.slices[slice_index]
        if self._where == "device":
            if self._on_device is None:
                self._on_device = torch.empty(rank.partition.numel, dtype=rank.dtype, device=rank.device)
            return self._on_device.narrow(0, s.begin, s.numel)
        total = torch.empty(s.numel, dtype=rank.dtype, device=rank.device)
        for begin, slot in self._jobs.slots.views_of_slice(slice_index):
            total.narrow(0, begin, slot.numel()).copy_(slot, non_blocking=True)
            rank.telemetry.h2d_bytes += slot.nbytes
        return total
