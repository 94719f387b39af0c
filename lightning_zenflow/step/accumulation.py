"""Where gradients are added up over a step's micro-batches: on the device, or in the host memory of the step's slots."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.worker.memory import has_room

_log = logging.getLogger(__name__)


class Accumulation(ABC):
    """Running sums of the slices' gradients. Rounded to the model's type after each micro-batch, the same bits wherever they are."""

    @abstractmethod
    def keep(self, slice_index: int, gradient: Tensor) -> None:
        """Begins a sum.

        Args:
            slice_index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device.
        """

    @abstractmethod
    def add(self, slice_index: int, gradient: Tensor) -> None:
        """Adds to the sum; arguments as in `keep`, `gradient` may be changed in place."""

    @abstractmethod
    def kept(self, slice_index: int) -> Tensor:
        """The sum: [slice.numel], model dtype, on the device."""


class DeviceAccumulation(Accumulation):
    """Sums on the device: as much memory as the rank's part of the gradients.

    Args:
        partition: the rank's partition.
        device: where gradients come from.
        dtype: the model's type.
    """

    def __init__(self, partition: Partition, *, device: torch.device, dtype: torch.dtype) -> None:
        self._partition = partition
        self._sums = torch.empty(partition.numel, dtype=dtype, device=device)

    @override
    def keep(self, slice_index: int, gradient: Tensor) -> None:
        self.kept(slice_index).copy_(gradient)

    @override
    def add(self, slice_index: int, gradient: Tensor) -> None:
        self.kept(slice_index).add_(gradient)

    @override
    def kept(self, slice_index: int) -> Tensor:
        s = self._partition.slices[slice_index]
        return self._sums.narrow(0, s.begin, s.numel)


class HostAccumulation(Accumulation):
    """Sums in the slots that the step's gradients go to in the end; they visit the device one slice at a time.

    The device needs memory for the largest slice only, and nobody waits for the host: sums cross PCIe both ways, in stream order.

    Args:
        partition: the rank's partition.
        slots: for a slice, (first element in the slice, part of a slot) of each piece that blocks cut it into.
        traffic: where the copied bytes are counted.
        device: where gradients come from.
        dtype: the model's type.
    """

    def __init__(
        self,
        partition: Partition,
        slots: Callable[[int], Sequence[tuple[int, Tensor]]],
        traffic: Traffic,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._partition = partition
        self._slots = slots
        self._traffic = traffic
        self._device = device
        self._dtype = dtype

    @override
    def keep(self, slice_index: int, gradient: Tensor) -> None:
        for begin, slot in self._slots(slice_index):
            slot.copy_(gradient.narrow(0, begin, slot.numel()), non_blocking=True)
            self._traffic.d2h_bytes += slot.numel() * slot.element_size()

    @override
    def add(self, slice_index: int, gradient: Tensor) -> None:
        self.keep(slice_index, gradient.add_(self.kept(slice_index)))

    @override
    def kept(self, slice_index: int) -> Tensor:
        total = torch.empty(self._partition.slices[slice_index].numel, dtype=self._dtype, device=self._device)
        for begin, slot in self._slots(slice_index):
            total.narrow(0, begin, slot.numel()).copy_(slot, non_blocking=True)
            self._traffic.h2d_bytes += slot.numel() * slot.element_size()
        return total


def new_accumulation(
    where: Literal["auto", "device", "host"],
    partition: Partition,
    slots: Callable[[int], Sequence[tuple[int, Tensor]]],
    traffic: Traffic,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Accumulation:
    """The accumulation that is asked for; to be called in backward, when the device's memory has been as full as it gets.

    Args:
        where: `ZenFlowConfig.accumulate_on`.
        partition: the rank's partition.
        slots: see `HostAccumulation`.
        traffic: likewise.
        device: where gradients come from.
        dtype: the model's type.
    """
    if where == "auto":
        where = "device" if has_room(partition.numel * dtype.itemsize, device) else "host"
        _log.info("ZenFlow: accumulate_on='auto': gradients are added up on the %s", where)
    if where == "host":
        return HostAccumulation(partition, slots, traffic, device=device, dtype=dtype)
    return DeviceAccumulation(partition, device=device, dtype=dtype)
