"""`AsyncHostCopy` on a CPU device."""

import torch

from lightning_zenflow.telemetry.events import AsyncHostCopy


def test_the_copy_is_complete_at_once_and_does_not_alias() -> None:
    source = torch.tensor([1.0, 2.0], dtype=torch.float64)
    copy = AsyncHostCopy(source)
    source.fill_(7)
    assert copy.arrived
    assert copy.read().tolist() == [1.0, 2.0] and copy.read().dtype == torch.float64
