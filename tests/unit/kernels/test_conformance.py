"""Every implementation of `Kernels` on every device: the same results, on awkward sizes. AdamW and the factors: see their own files."""

import pytest
import torch

from kernel_cases import (
    ALL,
    COMPILED,
    DTYPES,
    INTERPRETED,
    THREADS,
    TORCH,
    Implementation,
    each_with,
    parameter,
    random,
)
from lightning_zenflow.kernels.base import Destination, Selection, SquaredNorms
from lightning_zenflow.kernels.factored import Factors, RoundingNoise

SHAPES = [(1, 1), (1, 7), (3, 1), (33, 17), (7, 515), (2, 70001), (700, 1031)]
ON_EACH_SHAPE = pytest.mark.parametrize(("on", "shape"), each_with(SHAPES), indirect=["on"])


def total(norms: SquaredNorms) -> torch.Tensor:
    return norms.parts.sum(dtype=torch.float64)


@ON_EACH_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norms(on: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    # Columns are added up row by row in float32 by some.
    of_rows, of_columns = (1e-5, 2e-5) if on.device_type == "cuda" else (5e-6, 1e-5)
    if on.is_interpreted:
        of_rows = of_columns = 2e-6
    gradient = on.random(*shape, dtype=dtype)
    exact = gradient.double().square()
    both = on.kernels.route(gradient, (), per_axis=True)
    total_only = on.kernels.route(gradient, (), per_axis=False)
    assert both.rows.dtype == both.columns.dtype == torch.float32
    torch.testing.assert_close(total(both), exact.sum(), rtol=of_rows, atol=0)
    torch.testing.assert_close(both.rows.double(), exact.sum(1), rtol=of_rows, atol=0)
    torch.testing.assert_close(both.columns.double(), exact.sum(0), rtol=of_columns, atol=0)
    assert torch.equal(total(both), total(total_only))
    assert not total_only.per_axis


@pytest.mark.parametrize("on", [parameter(INTERPRETED, slow=True)], indirect=True)
def test_programs_of_large_matrices_have_more_rows(on: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = on.random(700, 300)
    expected = on.kernels.route(gradient, (), per_axis=True)
    monkeypatch.setattr("lightning_zenflow.kernels.triton._LARGE_MATRIX", gradient.numel() // 3)
    found = on.kernels.route(gradient, (), per_axis=True)
    assert found.parts.numel() < expected.parts.numel() / 2
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.columns, expected.columns, rtol=2e-6, atol=0)
    torch.testing.assert_close(total(found), total(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("value", "position"), [(float("nan"), 0), (float("-inf"), 516)])
def test_a_number_that_is_not_finite_shows_in_its_row_its_column_and_the_total(
    on: Implementation, value: float, position: int
) -> None:
    gradient = torch.ones(2, 517, device=on.device)
    gradient[1, position] = value
    squared_norms = on.kernels.route(gradient, (), per_axis=True)
    assert not torch.isfinite(total(squared_norms))
    assert torch.isfinite(squared_norms.rows).tolist() == [True, False]
    assert (~torch.isfinite(squared_norms.columns)).nonzero().flatten().tolist() == [position]


@pytest.mark.parametrize(("on", "shape"), each_with(SHAPES, interpreted=10_000), indirect=["on"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route_does_what_single_passes_do(on: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows cut anywhere; no, one and two selections, all columns among them; a single row cut in the middle."""
    rows, columns = shape
    gradient = on.random(*shape, dtype=dtype)
    some = on.tensor(sorted({0, columns // 3, columns - 1}))
    row_ranges = [(0, rows // 3), (rows // 3, rows)] if rows > 2 else [(0, rows)]

    def slot(n_rows: int, width: int) -> torch.Tensor:
        return torch.full((n_rows, width), 7, dtype=dtype, pin_memory=on.device_type == "cuda")

    def selection(n_rows: int, chosen: torch.Tensor | None) -> Selection:
        width = columns if chosen is None else len(chosen)
        return Selection(columns=chosen, entries=torch.zeros(n_rows, width, dtype=dtype, device=on.device))

    destinations = [
        Destination(
            begin=first * columns,
            slot=slot(last - first, columns),
            selections=[selection(last - first, c) for c in (None, some, some[:1]) if first > 0 or rows < 3],
        )
        for first, last in row_ranges
    ]
    if rows == 1 and columns > 1:
        destinations = [Destination(begin=0, slot=slot(1, 1)), Destination(begin=1, slot=slot(1, columns - 1))]
    squared_norms = on.kernels.route(gradient, destinations, per_axis=True)
    alone = on.kernels.route(gradient, (), per_axis=True)
    assert torch.equal(total(squared_norms), total(alone))
    assert torch.equal(squared_norms.rows, alone.rows)
    assert torch.equal(squared_norms.columns, alone.columns)
    if on.device_type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(torch.cat([d.slot.view(-1) for d in destinations]), gradient.view(-1).cpu())
    for destination in destinations:
        part = destination.part_of(gradient)
        for s in destination.selections:
            assert torch.equal(s.entries, part if s.columns is None else part[:, s.columns])


@ON_EACH_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_provisional_update(on: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """torch's bits; none changes with a gradient that is not finite. The largest shapes have more elements than the tile of noise."""
    rows, columns = shape
    inputs = [
        random(*shape, seed=1, dtype=dtype),
        random(rows, 1, seed=2).abs() * 1e-2,
        random(1, columns, seed=3).abs(),
    ]
    results = []
    for implementation in (TORCH, on):
        device = implementation.device
        weights, noise = implementation.random(*shape, dtype=dtype), RoundingNoise(7, device)
        for size, finite in ((1.0, True), (0.3, True), (1.0, False)):
            gradient, row_scale, col_scale = (t.to(device) for t in inputs)
            gradient = gradient if finite else torch.full_like(gradient, torch.nan)
            factors = Factors(row_scale=row_scale, col_scale=col_scale, finite=torch.tensor(finite, device=device))
            implementation.kernels.provisional_update_(weights, gradient, factors, noise, size=size)
        results.append(weights.cpu())
    expected, found = results
    if on.device_type == "cuda":
        # The same random bits: two roundings of float32 may tip a weight by one unit of its own type, rarely.
        rtol = max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=1e-6)
        assert dtype == torch.float32 or int((found != expected).sum()) <= 1e-3 * found.numel() + 1
    else:
        assert torch.equal(found, expected)
    assert found.numel() < 10 or not torch.equal(found, random(*shape, dtype=dtype))


@pytest.mark.parametrize("on", [parameter(on) for on in (*ALL, *THREADS)], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_there_and_back(on: Implementation, dtype: torch.dtype) -> None:
    """Some columns, all of them and none, of matrices of several sizes; written again with what the tensors hold by then."""
    shapes = ((90 if on.is_interpreted else 900, 701), (3, 5), (7, 1), (4, 6))
    columns = ([0, 3, 700], [1, 4], None, [])
    matrices = [torch.zeros(shape, dtype=dtype, device=on.device) for shape in shapes]
    chosen = [None if c is None else on.tensor(c, torch.int64) for c in columns]
    widths = [shape[1] if c is None else len(c) for shape, c in zip(shapes, columns, strict=True)]
    selected = [
        torch.zeros(shape[0], k, dtype=dtype, device=on.device) for shape, k in zip(shapes, widths, strict=True)
    ]
    write = on.kernels.column_writer(
        [(m, Selection(columns=c, entries=s)) for m, c, s in zip(matrices, chosen, selected, strict=True)]
    )
    on.kernels.column_writer([])()
    for seed in (1, 2):
        for values in selected:
            values.copy_(random(*values.shape, seed=seed, dtype=dtype))
        write()
        for matrix, of_matrix, values in zip(matrices, chosen, selected, strict=True):
            expected = torch.zeros_like(matrix)
            expected[:, slice(None) if of_matrix is None else of_matrix] = values
            assert torch.equal(matrix, expected)
            if of_matrix is not None:
                found = torch.empty_like(values)
                on.kernels.select(matrix, Selection(columns=of_matrix, entries=found))
                assert torch.equal(found, values)


def test_tensors_that_the_library_would_misread() -> None:
    """C++ sees addresses and integers only."""
    gradient = torch.ones(4, 6, dtype=torch.bfloat16)
    for slot in (torch.zeros(4, 6, dtype=torch.float32), torch.zeros(6, 4, dtype=torch.bfloat16).t()):
        with pytest.raises(AssertionError):
            COMPILED.kernels.route(gradient, [Destination(begin=0, slot=slot)], per_axis=False)
