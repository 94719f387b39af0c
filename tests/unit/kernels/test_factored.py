"""The provisional update's pure functions, and its owner on slices that ZeRO cut anywhere."""

import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.partition import Slice, build_partition, tiles_of_slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deferred.provisional import ProvisionalUpdate
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.factored import (
    Factors,
    RoundingNoise,
    SecondMoment,
    provisional_values,
    round_stochastically_,
)
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.kernels.torch import TorchKernels
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule

CPU = torch.device("cpu")
HYPERPARAMETERS = GroupHyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True)


def test_stochastic_rounding_has_the_right_expectation() -> None:
    noise = RoundingNoise(1, CPU)
    value = 1.0 + 2**-7 / 4  # a quarter of the way from one bfloat16 number to the next
    target = torch.empty(200_000, dtype=torch.bfloat16)
    round_stochastically_(target, torch.full(target.shape, value), noise)
    assert set(target.tolist()) == {1.0, 1.0 + 2**-7}
    # Standard error of the mean: 2^-7 * sqrt(0.25 * 0.75 / 200,000), about 8e-6.
    assert target.double().mean().item() == pytest.approx(value, abs=4e-5)


def test_rounding_repeats_with_the_seed_and_differs_without() -> None:
    def draw(seed: int) -> torch.Tensor:
        target = torch.empty(5000, dtype=torch.bfloat16)
        round_stochastically_(target, torch.linspace(0.1, 0.2, 5000), RoundingNoise(seed, CPU))
        return target

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_round_to_nearest(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    target = torch.empty(1000, dtype=dtype)
    round_stochastically_(target, values.clone(), RoundingNoise(1, CPU))
    assert torch.equal(target, values.to(dtype))


def test_exact_values_stay_exact() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.empty_like(values)
    round_stochastically_(target, values.float(), RoundingNoise(1, CPU))
    assert torch.equal(target, values)


def take_step(kernels: Kernels, moment: SecondMoment, gradient: Tensor, *, scale: float = 1.0) -> Factors:
    squares = gradient.square()
    return kernels.factored_step_(moment, squares.sum(1), squares.sum(0), beta2=0.99, lr=0.1, scale=torch.tensor(scale))


BOTH = pytest.mark.parametrize("kernels", [TorchKernels(), kernels_for(CPU)], ids=["torch", "cpu"])


@BOTH
@pytest.mark.parametrize("shape", [(2, 2), (5, 7), (16, 33), (700, 1031)])
def test_factors_are_adafactors(kernels: Kernels, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    moment = SecondMoment.zeros(rows, columns, CPU)
    mean_row, mean_col = torch.zeros(rows, dtype=torch.float64), torch.zeros(columns, dtype=torch.float64)
    for n in range(1, 4):
        gradient = torch.randn(rows, columns, generator=generator)
        squares = (0.5 * gradient.double()).square()
        mean_row = 0.99 * mean_row + 0.01 * squares.mean(1)
        mean_col = 0.99 * mean_col + 0.01 * squares.mean(0)
        factors = take_step(kernels, moment, gradient, scale=0.5)
        v = mean_row[:, None] * mean_col[None, :] / mean_col.mean() / (1 - 0.99**n)
        product = (factors.row_scale * factors.col_scale).double()
        torch.testing.assert_close(product, 0.1 * 0.5 * v.rsqrt(), rtol=1e-5, atol=0)
        assert factors.finite
        assert moment.n == n


@pytest.mark.parametrize("beta2", [0.0, 0.3, 0.95, 0.9999])
def test_the_compiled_factors_are_torchs(beta2: float) -> None:
    gradient = torch.randn(37, 1031, generator=torch.Generator().manual_seed(0)) * 1e-3
    squares, moments, found = gradient.square(), [], []
    for kernels in (TorchKernels(), kernels_for(CPU)):
        moment = SecondMoment.zeros(*gradient.shape, CPU)
        for scale in (1.0, 0.3, 0.7):
            factors = kernels.factored_step_(
                moment, squares.sum(1), squares.sum(0), beta2=beta2, lr=0.1, scale=torch.tensor(scale)
            )
        moments.append(moment)
        found.append(factors)
    torch.testing.assert_close(moments[1].tensors(), moments[0].tensors(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1].col_scale, found[0].col_scale, rtol=1e-6, atol=0)
    # torch's power is in float32, from which one is then taken.
    torch.testing.assert_close(found[1].row_scale, found[0].row_scale, rtol=1e-3 if beta2 > 0.99 else 2e-6, atol=0)


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e19])
def test_a_step_that_is_not_finite_changes_nothing(kernels: Kernels, value: float) -> None:
    """Neither where only the squares are not, or their sum."""
    moment = SecondMoment.zeros(3, 4, CPU)
    known = take_step(kernels, moment, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    before = [tensor.clone() for tensor in moment.tensors()]
    gradient = torch.full((3, 4), value)
    factors = take_step(kernels, moment, gradient)
    assert all(map(torch.equal, moment.tensors(), before))
    assert not factors.finite
    assert torch.equal(factors.row_scale, known.row_scale)
    assert torch.equal(factors.col_scale, known.col_scale)
    weights = torch.randn(3, 4)
    values = provisional_values(weights, gradient, factors.row_scale, factors.col_scale, finite=factors.finite)
    assert torch.equal(values, weights)


@BOTH
def test_rows_and_columns_without_gradient_do_not_move(kernels: Kernels) -> None:
    gradient = torch.randn(4, 6)
    gradient[1], gradient[:, 2] = 0.0, 0.0
    factors = take_step(kernels, SecondMoment.zeros(4, 6, CPU), gradient)
    weights = torch.randn(4, 6)
    values = provisional_values(weights, gradient, factors.row_scale, factors.col_scale, finite=factors.finite)
    assert torch.equal(values[1], weights[1])
    assert torch.equal(values[:, 2], weights[:, 2])
    assert torch.isfinite(values).all()


class OneSlice:
    """A stand-in of one slice, fed as `GradientRouter` feeds it."""

    def __init__(self, columns: int, start: int, numel: int, weights: torch.Tensor, *, is_matrix: bool = True) -> None:
        s = Slice(parameter=0, param_group=0, begin=0, start=start, numel=numel, columns=columns, is_matrix=is_matrix)
        self._kernels = kernels_for(CPU)
        self._rectangles = tiles_of_slice(0, s)
        self.provisional = ProvisionalUpdate(
            build_partition([s], [numel], 3),
            [weights],
            prediction=StalenessCompensation(weight_prediction=0.0, provisional_scale=0.5),
            schedule=lambda: UpdateSchedule(update_interval=4, publish_lag=1),
            rank=0,
            kernels=self._kernels,
            hyperparameters=lambda: [HYPERPARAMETERS],
        )

    def apply(self, gradient: torch.Tensor) -> None:
        for tile in self._rectangles:
            if tile.rows > 1 and self.provisional.moves(0):
                rectangle = gradient[tile.begin : tile.end].view(tile.rows, tile.width)
                move = self.provisional.measure(0, self._kernels.squared_norms(rectangle, per_axis=True))
                self.provisional.apply(move, 0, rectangle, age=1)


@pytest.mark.parametrize(("columns", "start", "numel"), [(7, 0, 35), (7, 3, 40), (7, 6, 22), (2, 1, 9)])
def test_moves_full_rows_by_lr_at_first(columns: int, start: int, numel: int) -> None:
    weights = torch.zeros(numel)
    first = -start % columns
    last = first + (numel - first) // columns * columns
    # Of rank one, so that the factored second moment is exact: each entry of the first step's update is b * lr in size.
    generator = torch.Generator().manual_seed(0)
    rows = (last - first) // columns
    rank_one = (torch.rand(rows, 1, generator=generator) + 0.5) * (torch.rand(1, columns, generator=generator) + 0.5)
    gradient = torch.ones(numel)
    gradient[first:last] = rank_one.flatten()
    OneSlice(columns, start, numel, weights).apply(gradient)
    torch.testing.assert_close(weights[first:last], torch.full((last - first,), -0.5 * 0.01), rtol=1e-5, atol=0)
    assert not weights[:first].any()
    assert not weights[last:].any()


@pytest.mark.parametrize(("columns", "numel", "is_matrix"), [(1, 8, False), (1, 8, True), (8, 8, True)])
def test_vectors_and_single_rows_wait_for_their_publish(columns: int, numel: int, is_matrix: bool) -> None:
    weights = torch.zeros(numel)
    OneSlice(columns, 0, numel, weights, is_matrix=is_matrix).apply(torch.ones(numel))
    assert not weights.any()


def test_gradients_that_are_not_finite_are_never_applied() -> None:
    weights = torch.zeros(12)
    one = OneSlice(4, 0, 12, weights)
    gradient = torch.ones(12)
    gradient[5] = torch.inf
    one.apply(gradient)
    assert not weights.any()
    one.apply(torch.ones(12))
    torch.testing.assert_close(weights, torch.full((12,), -0.005), rtol=1e-5, atol=0)


def test_the_last_steps_clip_coefficient_bounds_the_update() -> None:
    weights = torch.zeros(12)
    one = OneSlice(4, 0, 12, weights)
    gradient = torch.ones(12)
    one.apply(gradient)
    before = weights.clone()
    one.provisional.end_step(torch.tensor(torch.nan), torch.tensor(False))
    one.provisional.end_step(torch.tensor(0.01), torch.tensor(True))
    # 100 times the gradient at a hundredth of the coefficient is the same step.
    one.apply(100 * gradient)
    torch.testing.assert_close(weights - before, before, rtol=1e-4, atol=0)
