"""The formula of the provisional update: stochastic rounding, and the factors of every implementation."""

import pytest
import torch
from torch import Tensor

from kernel_cases import Implementation, each_with
from lightning_zenflow.kernels.factored import Factors, RoundingNoise, SecondMoment, round_stochastically_

CPU = torch.device("cpu")


def test_stochastic_rounding_has_the_right_expectation() -> None:
    noise = RoundingNoise(1, CPU)
    value = 1.0 + 2**-7 / 4  # a quarter of the way from one bfloat16 number to the next
    target = torch.empty(200_000, dtype=torch.bfloat16)
    round_stochastically_(target, torch.full(target.shape, value), noise)
    assert set(target.tolist()) == {1.0, 1.0 + 2**-7}
    # Standard error of the mean: 2^-7 * sqrt(0.25 * 0.75 / 200,000), about 8e-6.
    assert target.double().mean().item() == pytest.approx(value, abs=4e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_exact_values_stay_exact_and_other_types_round_to_nearest(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    if dtype == torch.bfloat16:
        values = values.bfloat16().float()
    target = torch.empty(1000, dtype=dtype)
    round_stochastically_(target, values.clone(), RoundingNoise(1, CPU))
    assert torch.equal(target, values.to(dtype))


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
