"""What goes to the compiled library and to the worker is checked before, since C++ sees addresses and integers only."""

import pytest
import torch

from lightning_zenflow import native
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.kernels.cpu import CpuKernels


def test_tensors_that_the_library_would_misread() -> None:
    gradient = torch.ones(4, 6, dtype=torch.bfloat16)
    for slot in (torch.zeros(4, 6, dtype=torch.float32), torch.zeros(6, 4, dtype=torch.bfloat16).t()):
        with pytest.raises(AssertionError):
            CpuKernels().route(gradient, [Destination(begin=0, slot=slot)], per_axis=False)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (native.Touch, {"n_rows": -1}),
        (native.Export, {"n_tiles": 2**32}),
        (native.UpdateJob, {"block": -1}),
        (native.ArenaHeader, {"n_slots": 2**32 + 3}),
    ],
)
def test_integers_that_a_field_cannot_hold(kind: type[native.Structure], values: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="cannot hold"):
        kind(**values)
