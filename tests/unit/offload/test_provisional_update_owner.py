"""The provisional update's owner: slices that ZeRO cut anywhere, and updates that are applied again after a publish."""

import copy

import pytest
import torch
from typing_extensions import override

from lightning_zenflow.core.partition import Slice, build_partition, tiles_of_slice
from lightning_zenflow.core.schedule import StaggeredSchedule, StalenessCompensation, UpdateSchedule
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.offload.provisional_update import LateGradient, ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Block, RankState
from rank_states import make_rank_state

HYPERPARAMETERS = GroupHyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True)
SCHEDULE = StaggeredSchedule.of(UpdateSchedule(update_interval=4, publish_lag=1), n_blocks=4)
COMPENSATION = StalenessCompensation(weight_prediction=0.0, provisional_scale=0.5)


class OneBlock(Block):
    """Has jobs in flight as a test says."""

    due: int | None = None
    overwriting = False

    def __init__(self) -> None:
        super().__init__(number=0, begin=0, end=0, tiles=(), slices={0})

    @override
    def next_due(self) -> int | None:
        return self.due

    @override
    def overwrites(self, step: int) -> bool:
        return self.overwriting


def make_update(rank: RankState) -> ProvisionalUpdate:
    return ProvisionalUpdate(rank, COMPENSATION, rank_number=0)


def late(rank: RankState, gradient: torch.Tensor, block: Block) -> LateGradient:
    """A gradient of the full rows of the first slice, all in one block; its slot has a copy."""
    norms = rank.kernels.route(gradient, (), per_axis=True)
    tiles = [(block, Destination(begin=0, slot=gradient.clone()))]
    return LateGradient(slice=0, gradient=gradient, squared_norms=norms, tiles=tiles)


class OneSlice:
    """The provisional update of one slice, fed as `Fill` feeds it, after a step with the clip coefficient `clip`."""

    def __init__(
        self, columns: int = 4, start: int = 0, numel: int = 12, *, is_matrix: bool = True, clip: float | None = 1.0
    ) -> None:
        s = Slice(parameter=0, param_group=0, begin=0, start=start, numel=numel, columns=columns, is_matrix=is_matrix)
        self.weights = torch.zeros(numel)
        self._rank = make_rank_state(build_partition([s], [numel], 3), [self.weights])
        self._tiles = tiles_of_slice(0, s)
        self.update, self._block = make_update(self._rank), OneBlock()
        if clip is not None:
            self.end_step(clip)

    def apply(self, gradient: torch.Tensor, *, loss_scale: float = 1.0) -> torch.Tensor:
        """Of the loss times `loss_scale`; returns by how much the weights move."""
        before = self.weights.clone()
        self.update.open(loss_scale)
        gradient = loss_scale * gradient
        for tile in self._tiles:
            if tile.rows > 1 and self.update.applies_to(0):
                matrix = gradient[tile.begin : tile.end].view(tile.rows, tile.width)
                self.update.apply_gradient(1, late(self._rank, matrix, self._block), HYPERPARAMETERS, SCHEDULE)
        return self.weights - before

    def end_step(self, clip: float, *, loss_scale: float = 1.0) -> None:
        """NaN: the step changed nothing."""
        one, factor = torch.ones(()), torch.tensor(clip / loss_scale)
        self.update.end_step(StepScale(factor=factor, finite=factor.isfinite(), norm=one, count=one), loss_scale)


ONES, FIRST = torch.ones(12), torch.full((12,), -0.5 * 0.01)
"""A gradient, and the first step of any gradient of equal entries: each is b * lr in size."""


@pytest.mark.parametrize(
    ("columns", "start", "numel", "is_matrix"),
    [(7, 0, 35, True), (7, 0, 35, False), (7, 3, 40, True), (2, 1, 9, True), (1, 0, 8, True), (8, 0, 8, True)],
)
def test_moves_full_rows_by_lr_at_first(columns: int, start: int, numel: int, is_matrix: bool) -> None:
    """Vectors, single rows and single columns wait for their publish."""
    first = -start % columns
    rows = (numel - first) // columns
    last = first + rows * columns
    # Of rank one, so that the factored second moment is exact.
    generator = torch.Generator().manual_seed(0)
    rank_one = (torch.rand(rows, 1, generator=generator) + 0.5) * (torch.rand(1, columns, generator=generator) + 0.5)
    gradient, expected = torch.ones(numel), torch.zeros(numel)
    gradient[first:last] = rank_one.flatten()
    if is_matrix and columns > 1 and rows > 1:
        expected[first:last] = FIRST[0]
    moved = OneSlice(columns, start, numel, is_matrix=is_matrix).apply(gradient)
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=0)


def test_the_last_steps_clip_coefficient_bounds_the_update() -> None:
    one = OneSlice(clip=None)
    # Before the first applied step nothing is known.
    one.end_step(torch.nan)
    assert not one.apply(ONES).any()
    one.end_step(1.0)
    gradient = ONES.clone()
    gradient[5] = torch.inf
    assert not one.apply(gradient).any()
    torch.testing.assert_close(one.apply(ONES), FIRST, rtol=1e-5, atol=0)
    one.end_step(0.01)
    one.end_step(torch.nan)
    # 100 times the gradient at a hundredth of the coefficient is the same step.
    torch.testing.assert_close(one.apply(100 * ONES), FIRST, rtol=1e-4, atol=0)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_loaded_state_replaces_what_was_there(steps: int) -> None:
    """Also that of a run whose slices have never been late, and by one that has trained before it loads."""
    used, saved = OneSlice(), OneSlice()
    gradients = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    used.apply(100 * gradients[3])
    used.end_step(0.01)
    for gradient in gradients[:steps]:
        saved.apply(gradient)
    used.update.load_state_dict(copy.deepcopy(saved.update.state_dict()))
    used.weights.copy_(saved.weights)
    for one in (used, saved):
        one.apply(gradients[2])
    assert torch.equal(used.weights, saved.weights)
