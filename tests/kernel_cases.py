"""What the tests of all implementations of the device's passes have in common."""

import torch
from torch import Tensor

from lightning_zenflow.kernels import Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tensor:
    """The same normal numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_statistics_of_a_bad_gradient(kernels: Kernels, value: float, position: int, device: torch.device) -> None:
    """A number that is not finite shows in the sums of its own row and column, and in the total."""
    gradient = torch.ones(2, 517, device=device)
    gradient[1, position] = value
    statistics = kernels.statistics(gradient, directions=True)
    assert statistics.rows is not None and statistics.columns is not None
    assert not torch.isfinite(statistics.total)
    assert torch.isfinite(statistics.rows).tolist() == [True, False]
    assert (~torch.isfinite(statistics.columns)).nonzero().flatten().tolist() == [position]


def check_columns_there_and_back(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """What is gathered are the columns; what is scattered goes there and nowhere else."""
    matrix = random(900, 701, dtype=dtype, device=device)
    columns = torch.tensor([0, 3, 350, 700], device=device)
    selected = torch.empty(900, 4, dtype=dtype, device=device)
    kernels.gather_columns(matrix, columns, selected)
    assert torch.equal(selected, matrix[:, columns])
    target = torch.zeros_like(matrix)
    kernels.scatter_columns(target, columns, selected)
    assert torch.equal(target[:, columns], selected)
    assert int((target != 0).sum()) == int((selected != 0).sum())
