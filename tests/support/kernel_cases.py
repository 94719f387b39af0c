"""What the tests of all implementations of the device's passes have in common."""

import torch
from torch import Tensor

from lightning_zenflow.kernels.base import ColumnWrite, Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tensor:
    """The same normal numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_squared_norms_of_a_bad_gradient(kernels: Kernels, value: float, position: int, device: torch.device) -> None:
    """A number that is not finite shows in the sums of its own row and column, and in the total."""
    gradient = torch.ones(2, 517, device=device)
    gradient[1, position] = value
    squared_norms = kernels.squared_norms(gradient, per_axis=True)
    assert squared_norms.rows is not None and squared_norms.columns is not None
    assert not torch.isfinite(squared_norms.total)
    assert torch.isfinite(squared_norms.rows).tolist() == [True, False]
    assert (~torch.isfinite(squared_norms.columns)).nonzero().flatten().tolist() == [position]


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
    check_repeated_writes(kernels, dtype, device)


def check_repeated_writes(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """Some columns, all of them and none, of matrices of several sizes; again with what the tensors hold by then."""
    shapes, columns = ((900, 701), (3, 5), (7, 1), (4, 6)), ([0, 3, 700], [1, 4], None, [])
    matrices = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    chosen = [None if c is None else torch.tensor(c, dtype=torch.int64, device=device) for c in columns]
    widths = [shape[1] if c is None else len(c) for shape, c in zip(shapes, columns, strict=True)]
    selected = [torch.zeros(shape[0], k, dtype=dtype, device=device) for shape, k in zip(shapes, widths, strict=True)]
    write = kernels.column_writer(
        [ColumnWrite(matrix=m, columns=c, selected=s) for m, c, s in zip(matrices, chosen, selected, strict=True)]
    )
    kernels.column_writer([])()
    for seed in (1, 2):
        for values in selected:
            values.copy_(random(*values.shape, seed=seed, dtype=dtype))
        write()
        for matrix, of_matrix, values in zip(matrices, chosen, selected, strict=True):
            expected = torch.zeros_like(matrix)
            expected[:, slice(None) if of_matrix is None else of_matrix] = values
            assert torch.equal(matrix, expected)
