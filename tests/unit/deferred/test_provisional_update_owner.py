"""The provisional update's owner: slices that ZeRO cut anywhere, and updates that are applied again after a publish."""

import copy
from typing import cast

import pytest
import torch

from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from lightning_zenflow.core.partition import Slice, build_partition, tiles_of_slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.deferred.in_flight import JobsInFlight
from lightning_zenflow.deferred.provisional_update import LateGradient, ProvisionalUpdate
from lightning_zenflow.kernels.base import Destination, Kernels
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.worker.rank_state import RankState
from rank_states import make_rank_state

HYPERPARAMETERS = GroupHyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True)
SCHEDULE = StaggeredSchedule.of(UpdateSchedule(update_interval=4, publish_lag=1), n_blocks=4)
COMPENSATION = StalenessCompensation(weight_prediction=0.0, provisional_scale=0.5)


class InFlight:
    """In the place of `JobsInFlight`."""

    due: int | None = None
    overwriting = False

    def next_due(self, block: int) -> int | None:
        return self.due

    def overwrites(self, block: int, step: int) -> bool:
        return self.overwriting


def make_update(rank: RankState, in_flight: InFlight | None = None) -> ProvisionalUpdate:
    return ProvisionalUpdate(rank, cast(JobsInFlight, in_flight or InFlight()), COMPENSATION, rank_number=0)


def late(rank: RankState, gradient: torch.Tensor) -> LateGradient:
    """A gradient of the full rows of the first slice, all in block 0; its slot has a copy."""
    norms = rank.kernels.squared_norms(gradient, per_axis=True)
    tiles = [(0, Destination(begin=0, slot=gradient.clone()))]
    return LateGradient(slice=0, gradient=gradient, squared_norms=norms, tiles=tiles)


class OneSlice:
    """The provisional update of one slice, fed as `ZenFlowStep` feeds it, after a step with the clip coefficient `clip`."""

    def __init__(
        self,
        columns: int,
        start: int,
        numel: int,
        weights: torch.Tensor,
        *,
        is_matrix: bool = True,
        clip: float | None = 1.0,
    ) -> None:
        s = Slice(parameter=0, param_group=0, begin=0, start=start, numel=numel, columns=columns, is_matrix=is_matrix)
        self._rank = make_rank_state(build_partition([s], [numel], 3), [weights])
        self._tiles = tiles_of_slice(0, s)
        self._update = make_update(self._rank)
        if clip is not None:
            self.end_step(clip)

    def apply(self, gradient: torch.Tensor, *, loss_scale: float = 1.0) -> None:
        """Of the loss times `loss_scale`."""
        self._update.open(loss_scale)
        gradient = loss_scale * gradient
        for tile in self._tiles:
            if tile.rows > 1 and self._update.applies_to(0):
                matrix = gradient[tile.begin : tile.end].view(tile.rows, tile.width)
                self._update.apply_gradient(1, late(self._rank, matrix), HYPERPARAMETERS, SCHEDULE)

    def take_over(self, other: "OneSlice") -> None:
        self._update.load_state_dict(copy.deepcopy(other._update.state_dict()))

    def end_step(self, clip: float, *, loss_scale: float = 1.0) -> None:
        """NaN: the step changed nothing."""
        one, factor = torch.ones(()), torch.tensor(clip / loss_scale)
        self._update.end_step(StepScale(factor=factor, finite=factor.isfinite(), norm=one, count=one), loss_scale)


@pytest.mark.parametrize(("columns", "start", "numel"), [(7, 0, 35), (7, 3, 40), (7, 6, 22), (2, 1, 9), (7, 0, 14)])
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
    one.end_step(0.01)
    one.end_step(torch.nan)
    # 100 times the gradient at a hundredth of the coefficient is the same step.
    one.apply(100 * gradient)
    torch.testing.assert_close(weights - before, before, rtol=1e-4, atol=0)


@pytest.mark.parametrize("applied", [2.0**16, 4.0, 2.0])
def test_a_changed_loss_scale_leaves_the_size(applied: float) -> None:
    """That of the last applied step, and those of two later ones, of which the second is not applied."""
    weights = torch.zeros(12)
    one = OneSlice(4, 0, 12, weights, clip=None)
    gradient = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).flatten() + 0.5
    one.end_step(0.5, loss_scale=applied)
    moved = []
    for loss_scale, clip in ((applied, torch.nan), (applied / 2, 0.5), (4 * applied, 0.5)):
        before = weights.clone()
        one.apply(gradient, loss_scale=loss_scale)
        one.end_step(clip, loss_scale=loss_scale)
        moved.append(weights - before)
    assert moved[0].all()
    torch.testing.assert_close(moved[1:], [moved[0]] * 2, rtol=1e-5, atol=0)


def test_without_an_applied_step_nothing_is_known() -> None:
    weights = torch.zeros(12)
    one = OneSlice(4, 0, 12, weights, clip=None)
    for clip in (torch.nan, 0.01):
        one.apply(torch.full((12,), 100.0), loss_scale=4.0)
        one.end_step(clip, loss_scale=4.0)
    assert not weights.any()
    # The second moment has this step's gradient only: the update is as long as any first one.
    one.apply(torch.full((12,), 100.0), loss_scale=2.0)
    torch.testing.assert_close(weights, torch.full((12,), -0.005), rtol=1e-5, atol=0)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_loaded_state_replaces_what_was_there(steps: int) -> None:
    """Also that of a run whose slices have never been late, and by one that has trained before it loads."""
    ours, theirs = torch.zeros(12), torch.zeros(12)
    used, saved = OneSlice(4, 0, 12, ours), OneSlice(4, 0, 12, theirs)
    gradients = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    used.apply(100 * gradients[3])
    used.end_step(0.01)
    for gradient in gradients[:steps]:
        saved.apply(gradient)
    used.take_over(saved)
    ours.copy_(theirs)
    for one in (used, saved):
        one.apply(gradients[2])
    assert torch.equal(ours, theirs)


class BehindTheHost(HostRuntime):
    runs_behind = True


@pytest.mark.parametrize(
    ("runtime", "room", "n_bytes"), [(HostRuntime, False, 0), (BehindTheHost, False, 96), (BehindTheHost, True, 0)]
)
def test_gradients_that_come_back_are_counted(
    runtime: type[HostRuntime], room: bool, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUNTIMES, "cpu", runtime)
    monkeypatch.setattr("lightning_zenflow.deferred.provisional_update.has_room", lambda *_: room)
    whole = Slice(parameter=0, param_group=0, begin=0, start=0, numel=24, columns=4, is_matrix=True)
    partition = build_partition([whole], [24], 1)
    weights = torch.zeros(24, dtype=torch.bfloat16)
    rank = make_rank_state(partition, [weights], kernels=Kernels())
    in_flight = InFlight()
    provisional = make_update(rank, in_flight)
    one = torch.ones(())
    provisional.end_step(StepScale(factor=one, finite=one > 0, norm=one, count=one), 1.0)
    provisional.open(1.0)
    gradient = torch.randn(6, 4).bfloat16()
    signs, in_flight.due = gradient.sign(), 5
    provisional.apply_gradient(5, late(rank, gradient), HYPERPARAMETERS, SCHEDULE)
    gradient.zero_()  # its memory is reused
    assert not weights.any(), "the job that is due overwrites them"
    traffic = rank.telemetry.traffic
    assert traffic == Traffic()
    # Applied twice, as another job without the gradient is in flight, and no more after that.
    for in_flight.overwriting in (True, False, True):
        provisional.published({0: 4}, SCHEDULE)
    assert (traffic.d2h_bytes, traffic.h2d_bytes) == (0, n_bytes)
    assert torch.equal(weights.view(6, 4).sign(), -signs)
