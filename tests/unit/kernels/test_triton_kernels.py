"""Triton's passes, interpreted on the CPU where there is no GPU, against torch's and the worker's arithmetic."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernel_cases
from harness import Case, run_here
from kernel_cases import DTYPES, check_columns_there_and_back, check_squared_norms_of_a_bad_gradient
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.cpu import CpuKernels
from lightning_zenflow.kernels.factored import RoundingNoise
from lightning_zenflow.kernels.torch import TorchKernels

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random = functools.partial(kernel_cases.random, device=DEVICE)
SHAPES = [(1, 1), (1, 7), (3, 1), (5, 16), (33, 17), (7, 515), (2, 2500), (70, 1031)]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    from lightning_zenflow.kernels.triton import TritonKernels

    return TritonKernels()


def step_scale(factor: float, *, finite: bool = True) -> StepScale:
    return StepScale(
        factor=torch.tensor(factor, device=DEVICE),
        finite=torch.tensor(finite, device=DEVICE),
        norm=torch.tensor(1.0, device=DEVICE),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gradient = random(*shape, dtype=dtype)
    exact = gradient.double().square()
    both, total_only = kernels.squared_norms(gradient, per_axis=True), kernels.squared_norms(gradient, per_axis=False)
    assert both.rows is not None and both.columns is not None
    assert both.total.dtype == torch.float64 and both.rows.dtype == both.columns.dtype == torch.float32
    torch.testing.assert_close(both.total, exact.sum(), rtol=2e-6, atol=0)
    torch.testing.assert_close(both.rows.double(), exact.sum(1), rtol=2e-6, atol=0)
    torch.testing.assert_close(both.columns.double(), exact.sum(0), rtol=2e-6, atol=0)
    assert torch.equal(both.total, total_only.total)
    assert total_only.rows is None and total_only.columns is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_statistics_of_a_bad_gradient_are_not_finite(kernels: Kernels, value: float) -> None:
    check_squared_norms_of_a_bad_gradient(kernels, value, 500, DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in_has_torchs_bits(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    gradient = random(*shape, seed=1, dtype=dtype)
    row_scale, col_scale = random(rows, 1, seed=2).abs() * 1e-2, random(1, columns, seed=3).abs()
    results = []
    for implementation in (TorchKernels(), kernels):
        weights, noise = random(*shape, dtype=dtype), RoundingNoise(7, DEVICE)
        for _ in range(2):
            implementation.provisional_update_(
                weights, gradient, row_scale, col_scale, noise, torch.tensor(True, device=DEVICE)
            )
        results.append(weights)
    assert torch.equal(*results)
    assert rows * columns < 10 or not torch.equal(results[0], random(*shape, dtype=dtype))


def test_stand_in_repeats_the_noise_as_torch_does(kernels: Kernels) -> None:
    """More elements than the tile of noise has."""
    weights = [random(70, 1031, dtype=torch.bfloat16) for _ in range(2)]
    ones = torch.full((70, 1), 1e-3, device=DEVICE), torch.ones(1, 1031, device=DEVICE)
    for w, implementation in zip(weights, (TorchKernels(), kernels), strict=True):
        noise, yes = RoundingNoise(3, DEVICE), torch.tensor(True, device=DEVICE)
        implementation.provisional_update_(w, random(70, 1031, seed=5, dtype=torch.bfloat16), *ones, noise, yes)
    assert torch.equal(*weights)


def group(*, decoupled: bool = True, weight_decay: float = 0.1) -> GroupHyperparameters:
    return GroupHyperparameters(
        lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
    )


@pytest.mark.parametrize("n", [1, 17, 2049])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "hyperparameters", [group(), group(decoupled=False), group(weight_decay=0.0)], ids=["adamw", "adam", "no decay"]
)
def test_exact_step(kernels: Kernels, n: int, dtype: torch.dtype, hyperparameters: GroupHyperparameters) -> None:
    """Of the worker's arithmetic; the interpreter jobs between the two operations of a fused multiply-add."""
    state = random(3, n).abs()
    expected = state.cpu().clone()
    weights = torch.empty(n, dtype=dtype, device=DEVICE)
    for step in range(1, 4):
        gradient, count = random(n, seed=step, dtype=dtype), torch.tensor(float(step), dtype=torch.float64)
        kernels.adamw_(
            state, gradient, weights, hyperparameters=hyperparameters, count=count.to(DEVICE), scale=step_scale(0.5)
        )
        here = StepScale(factor=torch.tensor(0.5), finite=torch.tensor(True), norm=torch.tensor(1.0))
        CpuKernels().adamw_(
            expected, gradient.cpu(), weights.cpu(), hyperparameters=hyperparameters, count=count, scale=here
        )
    torch.testing.assert_close(state.cpu(), expected, rtol=2e-6, atol=2e-7)
    assert torch.equal(weights, state[0].to(dtype))


def test_exact_step_may_publish_over_the_gradient(kernels: Kernels) -> None:
    state, gradient = random(3, 1000).abs(), random(1000, seed=1)
    again, separate, count = state.clone(), torch.empty_like(gradient), torch.ones((), dtype=torch.float64)
    count = count.to(DEVICE)
    kernels.adamw_(again, gradient, separate, hyperparameters=group(), count=count, scale=step_scale(1.0))
    kernels.adamw_(state, gradient, gradient, hyperparameters=group(), count=count, scale=step_scale(1.0))
    assert torch.equal(gradient, separate)


def test_a_bad_step_moves_nothing(kernels: Kernels) -> None:
    weights, no = random(3, 5), torch.tensor(False, device=DEVICE)
    before, gradient = weights.clone(), torch.full((3, 5), torch.nan, device=DEVICE)
    factors = torch.ones(3, 1, device=DEVICE), torch.ones(1, 5, device=DEVICE)
    kernels.provisional_update_(weights, gradient, *factors, RoundingNoise(1, DEVICE), no)
    assert torch.equal(weights, before)
    state, published = random(3, 15).abs(), torch.zeros(15, device=DEVICE)
    expected, count = state.clone(), torch.zeros((), dtype=torch.float64, device=DEVICE)
    scale = step_scale(torch.nan, finite=False)
    kernels.adamw_(state, gradient.view(-1), published, hyperparameters=group(), count=count, scale=scale)
    assert torch.equal(state, expected)
    assert torch.equal(published, expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_there_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    check_columns_there_and_back(kernels, dtype, DEVICE)


def test_training_by_tritons_passes(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """What a GPU does, on the CPU: the exact state is AdamW's, and what is trained hardly differs from the CPU's passes."""
    everything = {"weight_prediction": "auto", "provisional_scale": "auto", "select_interval": 3}
    case = Case(topk_ratio=0.3, precision="bf16-true", max_norm=1.0, strategy_options=everything)
    ours = run_here(case)
    monkeypatch.setattr("lightning_zenflow.zero.build.kernels_for", lambda device: kernels)
    by_triton = run_here(case)
    exact = run_here(replace(case, topk_ratio=0, update_interval=1, publish_lag=0, strategy_options={}))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for a, b, c in zip(getattr(by_triton, kind), getattr(exact, kind), getattr(ours, kind), strict=True):
            assert torch.equal(a, b), kind
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def gpu_instructions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """For each element type and kernel, how often each instruction of float32 occurs."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "triton_build.py"), "bf16", "fp32"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_they_compile_for_gpus(dtype: str, gpu_instructions: dict[str, dict[str, dict[str, int]]]) -> None:
    """To machine code, for which no GPU is needed. The arithmetic is that of IEEE, fused where the worker's is and nowhere else."""
    instructions = gpu_instructions[dtype]
    assert instructions["_provisional"].keys() == {"mul.rn", "sub.rn"}
    per_element = instructions["_adamw"]["div.rn"]
    assert instructions["_adamw"] == {
        "fma.rn": 5 * per_element, "mul.rn": 4 * per_element, "sqrt.rn": per_element, "div.rn": per_element
    }  # fmt: skip
    assert instructions["_sums_of_squares"].keys() == {"mul.rn", "add.rn"}
    assert instructions["_copy_columns"] == {}
