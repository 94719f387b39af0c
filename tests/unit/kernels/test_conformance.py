"""Every implementation of `Kernels` on every device: the same results, on awkward sizes; the exact step, against the worker's kernel, which
tests/cpp compares with AdamW in Python; the formula of the provisional update; which implementation a device gets.
"""

import math
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from kernel_cases import (
    ALL,
    COMPILED,
    DTYPES,
    INTERPRETED,
    THREADS,
    TORCH,
    Implementation,
    each_with,
    group,
    parameter,
    random,
)
from lightning_zenflow.core.step_inputs import GradientNorms, GroupHyperparameters, step_scale
from lightning_zenflow.kernels.base import (
    CpuKernels,
    Destination,
    Elements,
    Factors,
    Kernels,
    RoundingNoise,
    SecondMoment,
    Selection,
    SquaredNorms,
    kernels_for,
    round_stochastically_,
)

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPES = [(1, 1), (1, 7), (3, 1), (33, 17), (7, 515), (2, 70001), (700, 1031)]
ON_EACH_SHAPE = pytest.mark.parametrize(("on", "shape"), each_with(SHAPES), indirect=["on"])


@pytest.fixture(params=[parameter(implementation) for implementation in ALL])
def on(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """An implementation on a device; every one of them unless a test chooses."""
    implementation: Implementation = request.param
    if implementation.name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    if (implementation.device_type == "cuda") != torch.cuda.is_available() and (
        implementation.device_type == "cuda" or implementation.is_interpreted
    ):
        pytest.skip("needs a CUDA device; Triton's interpreter needs a machine without")
    before = torch.get_num_threads()
    torch.set_num_threads(implementation.threads)
    yield implementation
    torch.set_num_threads(before)


def total(norms: SquaredNorms) -> torch.Tensor:
    return norms.parts.sum(dtype=torch.float64)


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


@ON_EACH_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_route(on: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Squared norms. Rows cut anywhere; selections of none, of some and of all columns; a single row cut in the middle."""
    rows, columns = shape
    gradient = on.random(*shape, dtype=dtype)
    some = on.tensor(sorted({0, columns // 3, columns - 1}))

    def slot(n_rows: int, width: int) -> torch.Tensor:
        return torch.full((n_rows, width), 7, dtype=dtype, pin_memory=on.device_type == "cuda")

    def selection(n_rows: int, chosen: torch.Tensor | None) -> Selection:
        width = columns if chosen is None else len(chosen)
        return Selection(columns=chosen, entries=torch.zeros(n_rows, width, dtype=dtype, device=on.device))

    first, second = (rows // 3, rows // 2) if rows > 2 else (0, 0)
    row_ranges = {
        (0, first): None,
        (first, second): selection(second - first, None),
        (second, rows): selection(rows - second, some),
    }
    destinations = [
        Destination(begin=begin * columns, slot=slot(end - begin, columns), selection=of_rows)
        for (begin, end), of_rows in row_ranges.items()
        if end > begin
    ]
    if rows == 1 and columns > 1:
        destinations = [Destination(begin=0, slot=slot(1, 1)), Destination(begin=1, slot=slot(1, columns - 1))]
    squared_norms = on.kernels.route(gradient, destinations, per_axis=True)
    alone, total_only = (on.kernels.route(gradient, (), per_axis=per_axis) for per_axis in (True, False))
    assert not total_only.per_axis
    assert torch.equal(total(squared_norms), total(alone)) and torch.equal(total(alone), total(total_only))
    assert torch.equal(squared_norms.rows, alone.rows) and torch.equal(squared_norms.columns, alone.columns)
    assert alone.rows.dtype == alone.columns.dtype == torch.float32
    # Columns are added up row by row in float32 by some.
    of_rows, of_columns = (1e-5, 2e-5) if on.device_type == "cuda" else (5e-6, 1e-5)
    if on.is_interpreted:
        of_rows = of_columns = 2e-6
    exact = gradient.double().square()
    torch.testing.assert_close(total(alone), exact.sum(), rtol=of_rows, atol=0)
    torch.testing.assert_close(alone.rows.double(), exact.sum(1), rtol=of_rows, atol=0)
    torch.testing.assert_close(alone.columns.double(), exact.sum(0), rtol=of_columns, atol=0)
    if on.device_type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(torch.cat([d.slot.view(-1) for d in destinations]), gradient.view(-1).cpu())
    for destination in destinations:
        part = destination.part_of(gradient)
        if (s := destination.selection) is not None:
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
                selection = Selection(columns=of_matrix, entries=found)
                on.kernels.select_parts(matrix, [Destination(begin=0, slot=matrix, selection=selection)])
                assert torch.equal(found, values)


def test_tensors_that_the_library_would_misread() -> None:
    """C++ sees addresses and integers only."""
    gradient = torch.ones(4, 6, dtype=torch.bfloat16)
    for slot in (torch.zeros(4, 6, dtype=torch.float32), torch.zeros(6, 4, dtype=torch.bfloat16).t()):
        with pytest.raises(AssertionError):
            COMPILED.kernels.route(gradient, [Destination(begin=0, slot=slot)], per_axis=False)


def test_stochastic_rounding_has_the_right_expectation() -> None:
    """And exact values, and those of other types, are rounded to nearest."""
    noise = RoundingNoise(1, CPU)
    value = 1.0 + 2**-7 / 4  # a quarter of the way from one bfloat16 number to the next
    target = torch.empty(200_000, dtype=torch.bfloat16)
    round_stochastically_(target, torch.full(target.shape, value), noise)
    assert set(target.tolist()) == {1.0, 1.0 + 2**-7}
    # Standard error of the mean: 2^-7 * sqrt(0.25 * 0.75 / 200,000), about 8e-6.
    assert target.double().mean().item() == pytest.approx(value, abs=4e-5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = random(10, 100, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).float()
        round_stochastically_(rounded := torch.empty(values.shape, dtype=dtype), values.clone(), noise)
        assert torch.equal(rounded, values.to(dtype))


def take_step(
    on: Implementation, moment: SecondMoment, gradient: Tensor, *, scale: float = 1.0, beta2: float = 0.99
) -> Factors:
    norms = on.kernels.route(gradient, (), per_axis=True)
    return on.kernels.factored_step_(moment, norms, beta2=beta2, lr=0.1, scale=on.tensor(scale))


@pytest.mark.parametrize(("on", "shape"), each_with([(5, 7), (700, 1031)], interpreted=10_000), indirect=["on"])
@pytest.mark.parametrize("beta2", [0.3, 0.9999])
def test_factors_are_adafactors(on: Implementation, shape: tuple[int, int], beta2: float) -> None:
    moment = SecondMoment.zeros(*shape, on.device)
    mean_row, mean_col = (torch.zeros(n, dtype=torch.float64, device=on.device) for n in shape)
    for n in range(1, 4):
        gradient = on.random(*shape, seed=n)
        squares = (0.5 * gradient.double()).square()
        mean_row.lerp_(squares.mean(1), 1 - beta2)
        mean_col.lerp_(squares.mean(0), 1 - beta2)
        factors = take_step(on, moment, gradient, scale=0.5, beta2=beta2)
        v = mean_row[:, None] * mean_col[None, :] / mean_col.mean() / (1 - beta2**n)
        product = (factors.row_scale * factors.col_scale).double()
        # torch's power is in float32, from which one is then taken.
        tolerance = 1e-3 if beta2 > 0.99 else 1e-5
        torch.testing.assert_close(product, 0.1 * 0.5 * v.rsqrt(), rtol=tolerance, atol=0)
        assert factors.finite
        assert moment.n == n


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Triton's interpreter
@pytest.mark.parametrize(("value", "scale"), [(torch.nan, 1.0), (torch.inf, 1.0), (1e19, 1.0), (0.1, torch.nan)])
def test_a_step_that_is_not_finite_changes_nothing(on: Implementation, value: float, scale: float) -> None:
    """Neither where only the squares are not, or their sum, or the factor."""
    moment = SecondMoment.zeros(3, 4, on.device)
    known = take_step(on, moment, on.random(3, 4))
    before = [tensor.clone() for tensor in moment]
    gradient = torch.full((3, 4), value, device=on.device)
    factors = take_step(on, moment, gradient, scale=scale)
    assert all(map(torch.equal, moment, before))
    assert not factors.finite
    torch.testing.assert_close(factors.row_scale, known.row_scale * scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(factors.col_scale, known.col_scale)
    weights = on.random(3, 4, seed=1)
    moved = weights.clone()
    on.kernels.provisional_update_(moved, gradient, factors, RoundingNoise(1, on.device))
    assert torch.equal(moved, weights)
    # Rows and columns without gradient do not move either.
    gradient = on.random(3, 4)
    gradient[1], gradient[:, 2] = 0.0, 0.0
    factors = take_step(on, SecondMoment.zeros(3, 4, on.device), gradient)
    on.kernels.provisional_update_(moved, gradient, factors, RoundingNoise(1, on.device))
    assert torch.equal(moved[1], weights[1]) and torch.equal(moved[:, 2], weights[:, 2]) and moved.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize(("max_norm", "loss_scale"), [(0.0, 1000.1), (0.5, 1024.0), (1e6, 1000.1), (math.inf, 1024.0)])
def test_words_of_blocks(on: Implementation, max_norm: float, loss_scale: float, speculates: bool) -> None:
    """torch's: to the bit where nothing is clipped; with NaN from the first gradient on that is not finite."""
    words, norms = [], []
    for implementation in (TORCH, on):
        device = implementation.device
        of_steps = GradientNorms(2, device, speculates=speculates)
        for step in (3, 2**32 + 4, 5):
            of_steps.open(step, max_norm=max_norm, loss_scale=loss_scale)
            for block, n in enumerate((3, 1500)):
                of_steps.add([(loss_scale * implementation.random(n, seed=step + i)).square() for i in range(2)])
                of_vectors = (loss_scale * implementation.random(1, seed=step).double()).square()
                of_steps.add([of_vectors * torch.inf if step == 5 and block else of_vectors])
                words.append(implementation.kernels.block_word(of_steps, block).cpu())
                norms.append(of_steps.partial[block].cpu())
            whole = of_steps.whole()
            scale = step_scale(whole, max_norm=0.5, loss_scale=loss_scale, count=torch.zeros_like(whole))
            of_steps.end_step(whole, scale, loss_scale)
    factors = torch.stack(words).view(torch.float32)[:, 0]
    expected, found = factors.split(6)
    rtol = 1e-6 if max_norm in (0.5, math.inf) and not speculates else 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
    assert found.isnan().tolist() == [False] * 5 + [True] and (rtol == 0 or found[2] < 1 / loss_scale)
    torch.testing.assert_close(*torch.stack(norms).split(6), rtol=1e-12, atol=0)
    for word, step in zip(words[6:], (3, 3, 2**32 + 4, 2**32 + 4, 5, 5), strict=True):
        assert int(word[1]) == int(word[0]) ^ step % 2**32 and int(word[2:].view(torch.int64)) == step


def test_each_device_has_its_own_and_the_variable_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
    assert isinstance(kernels_for(CPU), CpuKernels)
    assert type(kernels_for(META)) is Kernels
    monkeypatch.setenv("ZENFLOW_KERNELS", "torch")
    assert type(kernels_for(CPU)) is Kernels
    monkeypatch.setenv("ZENFLOW_KERNELS", "cuda")
    with pytest.raises(
        ValueError, match="ZENFLOW_KERNELS must be torch or triton or cpu on cpu, or not be set, got 'cuda'"
    ):
        kernels_for(CPU)
    monkeypatch.setenv("ZENFLOW_KERNELS", "cpu")
    with pytest.raises(ValueError, match="ZENFLOW_KERNELS must be torch or triton on meta, or not be set, got 'cpu'"):
        kernels_for(META)


@pytest.mark.parametrize("name", ["route", "factored_step_", "provisional_update_", "column_writer", "adamw_"])
def test_where_a_kernel_cannot_be_compiled_torch_takes_over(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first launch compiles, and raises what Triton raises then."""
    triton = pytest.importorskip("lightning_zenflow.kernels.triton", reason="Triton has no wheel for this platform")
    error = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    monkeypatch.setattr(triton.TritonKernels, name, Mock(side_effect=error))
    monkeypatch.setenv("ZENFLOW_KERNELS", "triton")
    assert type(kernels_for(CPU)) is Kernels
    assert "Triton's kernels cannot be used, torch's are" in caplog.text
    assert "Failed to find C compiler" in caplog.text and "ZENFLOW_KERNELS=torch" in caplog.text


# On the CPU, torch's is what the compiled one is compared with.
@pytest.mark.parametrize(
    ("on", "n"),
    [p for p in each_with([1, 513, 600_000]) if (p.values[0].name, p.values[0].device_type) != ("torch", "cpu")],
    indirect=["on"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "h", [group(), group(decoupled=False), group(weight_decay=0.0)], ids=["adamw", "adam", "no decay"]
)
def test_the_workers_arithmetic(on: Implementation, n: int, dtype: torch.dtype, h: GroupHyperparameters) -> None:
    """Of `CpuKernels`, which is compiled from the worker's kernel, and that one against torch's."""
    other = TORCH if on.name == "cpu" else COMPILED
    state, expected = on.random(3, n).abs(), random(3, n).abs()
    done = Elements.of(state, state[0], state[0]).done
    # The first one is skipped, too: the weights then are the masters.
    for number, (step, factor) in enumerate(((0, torch.nan), (1, 0.5), (2, 0.5), (2, torch.nan), (3, 0.5)), 1):
        gradient, before = random(n, seed=step, dtype=dtype), state.clone()
        if factor != factor:
            gradient[0], gradient[n // 2], gradient[-1] = torch.nan, torch.inf, -torch.inf
        ours = gradient.to(on.device, copy=True)
        weights = ours if step == 3 else torch.empty_like(ours)  # they may take the gradient's place
        elements = Elements(state=state, gradient=ours, weights=weights, done=done)
        # As where an interrupt has hidden the first call's return.
        for _ in range(1 + on.kernels.adamw_is_repeatable):
            on.adamw_(elements, h, number, count=step, factor=factor)
        of_other = Elements.of(expected, gradient, torch.empty_like(gradient))
        other.adamw_(of_other, h, number, count=step, factor=factor)
        assert factor == factor or torch.equal(state, before)
        # The interpreter truncates to bfloat16.
        unit = torch.finfo(dtype).eps if on.is_interpreted and dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(weights, state[0].to(dtype), rtol=unit, atol=0)
    # The interpreter rounds between the two operations of a fused multiply-add.
    torch.testing.assert_close(state.cpu(), expected, rtol=2e-6, atol=2e-7)
    assert str(on) != "triton-cuda" or torch.equal(state.cpu(), expected)
