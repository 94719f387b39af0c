"""The provisional update's owner on slices that ZeRO cut anywhere."""

import pytest
import torch

from lightning_zenflow.core.partition import Slice, build_partition, tiles_of_slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deferred.provisional import ProvisionalUpdate
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule

CPU = torch.device("cpu")
HYPERPARAMETERS = GroupHyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True)


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
