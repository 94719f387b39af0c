"""The recorded device itself: which operations the host waits for, as on a CUDA device, and which are errors there."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from recorded_device.clocks import HOST
from recorded_device.device import RecordedDevice
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device

Operation = Callable[[Tensor, Tensor, Tensor], object]
"""Of a tensor of the device, one in pageable and one in page-locked memory of the host: [3, 4] float32 each."""


@pytest.fixture
def device() -> Iterator[RecordedDevice]:
    with recorded_device() as device:
        yield device


def tensors(device: RecordedDevice) -> tuple[Tensor, Tensor, Tensor]:
    shape = (3, 4)
    return torch.ones(shape, device=DEVICE), torch.ones(shape), device.empty_on_host(shape, torch.float32).zero_()


WAITS: list[Operation] = [
    lambda device, _, __: device[0, 0].item(),
    lambda device, _, __: bool(device[0, 0] > 0),
    lambda device, _, __: device.tolist(),
    lambda device, _, __: device.cpu(),
    lambda device, _, __: device.nonzero(),
    lambda device, _, __: torch.equal(device, device),
    lambda device, _, __: torch.unique(device),
    lambda device, _, __: device[device > 0],
    lambda device, _, __: device.__setitem__(device > 0, torch.zeros(12, device=DEVICE)),
    lambda device, _, __: device[torch.tensor([0, 1])],
    lambda device, pageable, _: pageable.copy_(device, non_blocking=True),
    lambda device, pageable, _: device.copy_(pageable, non_blocking=True),
    lambda device, pageable, _: pageable.to(DEVICE, non_blocking=True),
    lambda device, _, locked: locked.copy_(device),
    lambda device, _, locked: device.copy_(locked),
    # By way of pageable memory.
    lambda device, _, locked: device.view(-1)[:3].copy_(locked[:, 0], non_blocking=True),
    lambda device, _, locked: locked[:, 0].copy_(device.view(-1)[:3], non_blocking=True),
    lambda device, _, locked: device.double().copy_(locked, non_blocking=True),
]
NO_WAITS: list[Operation] = [
    lambda device, _, __: device[1:].add_(device[0]),
    lambda device, _, __: device.mul_(torch.tensor(2.0)),
    lambda device, _, __: device.__setitem__(device > 0, 2.0),
    lambda device, _, __: torch.where(device > 0, device, 0.0),
    lambda device, _, __: device[torch.arange(2, device=DEVICE)],
    lambda device, _, locked: locked.copy_(device, non_blocking=True),
    lambda device, _, locked: locked.copy_(device.double(), non_blocking=True),
    lambda device, _, locked: locked[1:].to(DEVICE, non_blocking=True),
    lambda _, pageable, __: pageable[pageable > 0].tolist(),
]
MIXED: list[Operation] = [
    lambda device, pageable, _: device + pageable,
    lambda device, _, locked: device.add_(locked),
    lambda device, pageable, _: pageable.add_(device[0, 0]),
    lambda device, pageable, _: torch.cat([device, pageable]),
]


@pytest.mark.parametrize("operation", WAITS + NO_WAITS + MIXED)
def test_what_the_host_waits_for_and_what_is_an_error(operation: Operation, device: RecordedDevice) -> None:
    of_both = tensors(device)
    operation(*of_both)
    if operation in MIXED:
        (error,) = device.order.races
        assert "mixes memory of host and device" in error
    else:
        assert [o.kind for o in device.order.operations].count("host wait") == (operation in WAITS)
        assert not device.order.races


def test_the_host_must_wait_before_it_reads(device: RecordedDevice) -> None:
    on_device, _, locked = tensors(device)
    locked.copy_(on_device, non_blocking=True)
    copied = device.main.record_event()
    copied.synchronize()
    locked.sum()
    assert not device.order.races
    locked.copy_(on_device, non_blocking=True)
    locked.sum()
    (error,) = device.order.races
    assert error.endswith(f"on {HOST}")
