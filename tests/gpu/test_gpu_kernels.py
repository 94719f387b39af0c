"""On a CUDA device: torch's and Triton's passes over gradients against those of the CPU."""

import math

import pytest
import torch

from gpu_cases import device
from kernel_cases import DTYPES, check_columns_there_and_back, check_squared_norms_of_a_bad_gradient, random
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.cpu import CpuKernels
from lightning_zenflow.kernels.factored import RoundingNoise
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.kernels.torch import TorchKernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda", "no_worker_is_left")]

SHAPES = [(1, 1), (1, 7), (3, 1), (5, 16), (31, 17), (2, 70001), (700, 1031), (4096, 4096)]


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else kernels_for(device())


def test_cuda_has_tritons() -> None:
    assert type(kernels_for(device())).__name__ == "TritonKernels"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gradient = random(*shape, dtype=dtype)
    theirs = CpuKernels().squared_norms(gradient, per_axis=True)
    ours = kernels.squared_norms(gradient.to(device()), per_axis=True)
    total_only = kernels.squared_norms(gradient.to(device()), per_axis=False)
    assert ours.rows is not None and ours.columns is not None and theirs.rows is not None and theirs.columns is not None
    torch.testing.assert_close(ours.total.cpu(), theirs.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.rows.cpu(), theirs.rows, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.columns.cpu(), theirs.columns, rtol=2e-5, atol=0)
    assert torch.equal(ours.total, total_only.total)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_statistics_of_a_bad_gradient_are_not_finite(kernels: Kernels, value: float) -> None:
    check_squared_norms_of_a_bad_gradient(kernels, value, 500, device())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    gradient = random(*shape, seed=1, dtype=dtype)
    row_scale, col_scale = random(rows, 1, seed=2).abs() * 1e-2, random(1, columns, seed=3).abs()
    weights, before = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    ours = weights.to(device())
    for finite in (True, False):
        CpuKernels().provisional_update_(
            weights, gradient, row_scale, col_scale, RoundingNoise(7, torch.device("cpu")), torch.tensor(finite)
        )
        on_device = [t.to(device()) for t in (gradient, row_scale, col_scale)]
        kernels.provisional_update_(ours, *on_device, RoundingNoise(7, device()), torch.tensor(finite, device=device()))
        # The same random bits: two roundings of float32 may tip a weight by one unit of its own type, rarely.
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.cpu().float(), weights.float(), rtol=max(unit, 1e-6), atol=1e-6)
        assert dtype == torch.float32 or int((ours.cpu() != weights).sum()) <= 1e-3 * weights.numel() + 1
    assert weights.numel() < 10 or not torch.equal(weights, before)


@pytest.mark.parametrize("n", [1, 17, 513, 600_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw(kernels: Kernels, n: int, dtype: torch.dtype, decoupled: bool) -> None:
    state, weights = random(3, n).abs(), torch.empty(n, dtype=dtype)
    ours, shown = state.to(device()), weights.to(device())
    h = GroupHyperparameters(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    for step, finite in ((1, True), (2, True), (2, False), (3, True)):
        gradient, count = random(n, seed=step, dtype=dtype), torch.tensor(float(step), dtype=torch.float64)
        factor = torch.tensor(0.5 if finite else math.nan)
        scale = StepScale(factor=factor, finite=torch.tensor(finite), norm=factor)
        scale_there = StepScale(factor=factor.to(device()), finite=scale.finite.to(device()), norm=factor.to(device()))
        before = ours.clone()
        CpuKernels().adamw_(state, gradient, weights, hyperparameters=h, count=count, scale=scale)
        kernels.adamw_(
            ours, gradient.to(device()), shown, hyperparameters=h, count=count.to(device()), scale=scale_there
        )
        assert finite or torch.equal(ours, before)
    torch.testing.assert_close(ours.cpu(), state, rtol=2e-6, atol=2e-7)
    assert isinstance(kernels, TorchKernels) or torch.equal(ours.cpu(), state)
    assert torch.equal(shown, ours[0].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_there_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    check_columns_there_and_back(kernels, dtype, device())
