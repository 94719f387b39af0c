"""The compiled passes of the CPU against torch's, on awkward sizes; and training with either."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from harness import Case, run_here
from kernel_cases import CPU, DTYPES, check_columns_there_and_back, check_squared_norms_of_a_bad_gradient, random
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Destination, Kernels, Selection
from lightning_zenflow.kernels.cpu import CpuKernels
from lightning_zenflow.kernels.factored import RoundingNoise
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.kernels.torch import TorchKernels, adamw_step_

SHAPES = [(1, 1), (1, 7), (3, 1), (5, 16), (31, 17), (7, 515), (2, 70001), (700, 1031)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [CpuKernels(), TorchKernels()], ids=["cpu", "torch"])
def test_statistics(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    gradient = random(*shape, dtype=dtype)
    exact = gradient.double().square()
    both, total_only = kernels.squared_norms(gradient, per_axis=True), kernels.squared_norms(gradient, per_axis=False)
    assert both.rows is not None and both.columns is not None
    torch.testing.assert_close(both.total, exact.sum(), rtol=5e-6, atol=0)
    torch.testing.assert_close(both.rows.double(), exact.sum(1), rtol=5e-6, atol=0)
    # Added up row by row in float.
    torch.testing.assert_close(both.columns.double(), exact.sum(0), rtol=1e-5, atol=0)
    assert torch.equal(both.total, total_only.total)
    assert total_only.rows is None and total_only.columns is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 500, 516])
@pytest.mark.parametrize("kernels", [CpuKernels(), TorchKernels()], ids=["cpu", "torch"])
def test_statistics_of_a_bad_gradient_are_not_finite(kernels: Kernels, value: float, position: int) -> None:
    check_squared_norms_of_a_bad_gradient(kernels, value, position, CPU)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in_has_torchs_bits(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    rows, columns = shape
    gradient = random(*shape, seed=1, dtype=dtype)
    row_scale, col_scale = random(rows, 1, seed=2).abs() * 1e-2, random(1, columns, seed=3).abs()
    results = []
    for kernels in (TorchKernels(), CpuKernels()):
        weights, noise = random(*shape, dtype=dtype), RoundingNoise(7, CPU)
        for _ in range(2):
            kernels.provisional_update_(weights, gradient, row_scale, col_scale, noise, torch.tensor(True))
        results.append(weights)
    assert torch.equal(*results)
    assert rows * columns < 10 or not torch.equal(results[0], random(*shape, dtype=dtype))


@pytest.mark.parametrize("kernels", [CpuKernels(), TorchKernels()], ids=["cpu", "torch"])
def test_a_bad_step_moves_nothing(kernels: Kernels) -> None:
    weights, before, no = random(3, 5), random(3, 5), torch.tensor(False)
    gradient = torch.full((3, 5), torch.nan)
    kernels.provisional_update_(weights, gradient, torch.ones(3, 1), torch.ones(1, 5), RoundingNoise(1, CPU), no)
    assert torch.equal(weights, before)
    state, published = random(3, 15).abs(), torch.zeros(15)
    expected = state.clone()
    scale = StepScale(factor=torch.tensor(torch.nan), finite=no, norm=torch.tensor(torch.nan))
    count = torch.tensor(1.0, dtype=torch.float64)
    kernels.adamw_(state, gradient.view(-1), published, hyperparameters=group(), count=count, scale=scale)
    assert torch.equal(state, expected)
    assert torch.equal(published, expected[0])


def group(*, decoupled: bool = True, weight_decay: float = 0.1) -> GroupHyperparameters:
    return GroupHyperparameters(
        lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
    )


@pytest.mark.parametrize("n", [1, 17, 513, 600_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw(n: int, dtype: torch.dtype, decoupled: bool, threads: int) -> None:
    state = random(3, n).abs()
    expected = state.clone()
    weights = torch.empty(n, dtype=dtype)
    scale = StepScale(factor=torch.tensor(0.5), finite=torch.tensor(True), norm=torch.tensor(2.0))
    for step in range(1, 4):
        gradient, count = random(n, seed=step, dtype=dtype), torch.tensor(float(step), dtype=torch.float64)
        h = group(decoupled=decoupled)
        CpuKernels().adamw_(state, gradient, weights, hyperparameters=h, count=count, scale=scale)
        adamw_step_(*expected, gradient, hyperparameters=h, count=count, factor=scale.factor, finite=scale.finite)
    torch.testing.assert_close(state, expected, rtol=2e-6, atol=2e-7)
    assert torch.equal(weights, state[0].to(dtype))


def test_adamw_may_publish_over_the_gradient() -> None:
    state, gradient = random(3, 1000).abs(), random(1000, seed=1)
    again, separate = state.clone(), torch.empty(1000)
    scale = StepScale(factor=torch.tensor(1.0), finite=torch.tensor(True), norm=torch.tensor(1.0))
    count = torch.tensor(1.0, dtype=torch.float64)
    CpuKernels().adamw_(again, gradient, separate, hyperparameters=group(), count=count, scale=scale)
    CpuKernels().adamw_(state, gradient, gradient, hyperparameters=group(), count=count, scale=scale)
    assert torch.equal(gradient, separate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [CpuKernels(), TorchKernels()], ids=["cpu", "torch"])
def test_columns_there_and_back(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    check_columns_there_and_back(kernels, dtype, CPU)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_pass_does_what_single_ones_do(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """Rows cut anywhere; no, one and two selections, all columns among them; a single row cut in the middle."""
    rows, columns = shape
    gradient = random(*shape, dtype=dtype)
    some = torch.tensor(sorted({0, columns // 3, columns - 1}))
    pieces = [(0, rows // 3), (rows // 3, rows)] if rows > 2 else [(0, rows)]
    results = []
    for kernels in (CpuKernels(), TorchKernels()):
        destinations = [
            Destination(
                begin=first * columns,
                slot=torch.full((last - first, columns), 7, dtype=dtype),
                selections=[
                    Selection(columns=None, target=torch.zeros(last - first, columns, dtype=dtype)),
                    Selection(columns=some, target=torch.zeros(last - first, len(some), dtype=dtype)),
                    Selection(columns=some[:1], target=torch.zeros(last - first, 1, dtype=dtype)),
                ][: 3 * (first > 0 or rows < 3)],
            )
            for first, last in pieces
        ]
        if rows == 1 and columns > 1:
            slots = [torch.full((1, width), 7, dtype=dtype) for width in (1, columns - 1)]
            destinations = [Destination(begin=0, slot=slots[0]), Destination(begin=1, slot=slots[1])]
        squared_norms = kernels.route(gradient, destinations, per_axis=True)
        alone = kernels.squared_norms(gradient, per_axis=True)
        assert squared_norms.rows is not None and squared_norms.columns is not None
        assert alone.rows is not None and alone.columns is not None
        assert torch.equal(squared_norms.total, alone.total)
        assert torch.equal(squared_norms.rows, alone.rows)
        assert torch.equal(squared_norms.columns, alone.columns)
        results.append([t for d in destinations for t in (d.slot, *(s.target for s in d.selections))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(torch.cat([d.slot.view(-1) for d in destinations]), gradient.view(-1))


def test_the_cpu_has_its_own() -> None:
    assert isinstance(kernels_for(CPU), CpuKernels)
    assert isinstance(kernels_for(torch.device("meta")), TorchKernels)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_training_by_torchs_passes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU: the state is AdamW's in the same sense, and shown weights hardly differ."""
    everything = {"weight_prediction": "auto", "provisional_scale": "auto", "select_interval": 3}
    case = Case(topk_ratio=0.3, precision=precision, max_norm=1.0, accumulate=2, strategy_options=everything)
    ours = run_here(case)
    monkeypatch.setattr("lightning_zenflow.zero.build.kernels_for", lambda device: TorchKernels())
    exact = run_here(replace(case, topk_ratio=0, update_interval=1, publish_lag=0, strategy_options={}))
    by_torch = run_here(case)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for a, b, c in zip(getattr(by_torch, kind), getattr(exact, kind), getattr(ours, kind), strict=True):
            assert torch.equal(a, b), kind
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
