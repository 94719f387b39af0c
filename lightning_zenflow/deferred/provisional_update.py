"""Provisional updates of host-owned weights: applied during backward, replaced by the next publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.device import has_room, runtime_of
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.deferred.in_flight import JobsInFlight
from lightning_zenflow.deferred.memory import Publisher
from lightning_zenflow.kernels.base import Destination, SquaredNorms
from lightning_zenflow.kernels.factored import Factors, RoundingNoise, SecondMoment
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.worker.rank_state import RankState

_SEED = 20251205


@dataclass(kw_only=True, slots=True)
class _Body:
    """Full rows of one slice, and the second moment of their gradient."""

    weights: Tensor
    """[rows, columns]; of the model."""
    moment: SecondMoment | None = None
    """Made when the slice is late for the first time: a run that stays at S = 1, d = 0 has none."""

    def made_moment(self) -> SecondMoment:
        """`moment`; makes it, without any step in it."""
        if self.moment is None:
            rows, columns = self.weights.shape
            self.moment = SecondMoment.zeros(rows, columns, self.weights.device)
        return self.moment


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionalFactors:
    """A provisional update of one slice, without its size and the gradient."""

    slice: int
    """Index into `Partition.slices`."""
    factors: Factors
    """Of the slice's full rows."""
    beta1: float
    """Decay of the first moment in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateTile:
    """A tile whose weights will lack its gradient in some forward pass."""

    block: int
    """Index into `Partition.blocks`."""
    destination: Destination
    """Position in the slice's full rows, and the gradient's slot in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateGradient:
    """Gradient of a slice's full rows, of which some tiles are late."""

    slice: int
    """Index into `Partition.slices`; one that `ProvisionalUpdate.applies_to`."""
    gradient: Tensor
    """[rows, columns], model dtype, on the device."""
    squared_norms: SquaredNorms
    """With those of rows and columns."""
    tiles: Sequence[LateTile]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One update of a part of a slice."""

    step: int
    factors: ProvisionalFactors
    begin: int
    gradient: Tensor
    """[rows, width]; on the device, or in the slot of the step."""
    in_slot: bool
    """Whether it must be copied to the device first."""


class ProvisionalUpdate:
    """Updates the host-owned weights of a rank during backward, with a factored second moment (`kernels.factored`).

    A job that is published d steps after its window closed overwrites the weights with the exact state of its own steps. The provisional
    updates of the d steps since then would be lost until the next publish, S steps later, so they are applied again, in their order. Only
    blocks with a job in flight are concerned (`UpdateSchedule.kept_share`). Their gradients stay on the device where it has room; otherwise
    they are copied back from their slots in host memory.

    Matrices only, and of them full rows: the at most two rows of a slice that ZeRO's partition cuts wait for their publish. Device-owned
    entries are updated as well, and overwritten by their exact values in the same step.

    The clip coefficient of a step is not known during its backward pass. That of the last applied step takes its place, with the step's own
    loss scale. Before any step has been applied (nothing is known after a start, or after a checkpoint without this state), there is none:
    such a step updates nothing here, and its gradient is not in the second moment, so that an unclipped one never is.

    Args:
        in_flight: jobs that will overwrite the weights.
        publisher: knows the age of the weights.
        compensation: size of the updates.
        rank_number: number of the rank; ranks use different rounding noise.
    """

    def __init__(
        self,
        rank: RankState,
        in_flight: JobsInFlight,
        publisher: Publisher,
        compensation: StalenessCompensation,
        *,
        rank_number: int,
    ) -> None:
        self._rank = rank
        self._in_flight = in_flight
        self._publisher = publisher
        self._compensation = compensation
        self._noise = RoundingNoise(_SEED + rank_number, rank.device)
        self._clip = torch.full((), torch.nan, device=rank.device)
        # On the gradients of the open step. Both stay in their memory: backward and the step use different streams.
        self._factor = self._clip.clone()
        self._bodies: list[_Body | None] = [
            _body(s, rank.weights_at(s.param_group, s.begin, s.numel)) if compensation.updates_provisionally else None
            for s in rank.partition.slices
        ]
        self._keeps_on_device: dict[StaggeredSchedule, bool] = {}
        self._kept: dict[int, list[_Kept]] = {}  # by block

    def open(self, loss_scale: float) -> None:
        """Begins a step, before its first gradient."""
        torch.div(self._clip, loss_scale, out=self._factor)

    def applies_to(self, slice_index: int) -> bool:
        """Whether a slice has rows to update."""
        return self._bodies[slice_index] is not None

    def apply_gradient(
        self, step: int, late: LateGradient, hyperparameters: GroupHyperparameters, schedule: StaggeredSchedule
    ) -> None:
        """Updates the weights of late tiles: now, once more after the publish of a job in flight, or only then.

        Args:
            step: number of the step.
            late: gradient of the step; its memory may be reused after the work that this call enqueues.
            hyperparameters: of the slice's parameter group.
            schedule: present S and d.
        """
        factors = self.measure(late.slice, late.squared_norms, hyperparameters)
        of_tiles = [
            (self._publisher.age(tile.block, step), self._in_flight.next_due(tile.block), schedule.of_block(tile.block))
            for tile in late.tiles
        ]
        all_late = sum(tile.destination.slot.numel() for tile in late.tiles) == late.gradient.numel()
        if all_late and len(set(of_tiles)) == 1 and of_tiles[0][1] is None:
            age, _, of_tile = of_tiles[0]
            self.apply(factors, 0, late.gradient, age=age, schedule=of_tile)
            return
        for tile, (age, due_step, of_tile) in zip(late.tiles, of_tiles, strict=True):
            part = tile.destination.part_of(late.gradient)
            # A job that is due in this step overwrites the weights before any forward pass.
            if due_step is None or due_step > step:
                self.apply(factors, tile.destination.begin, part, age=age, schedule=of_tile)
            if due_step is not None:
                self.keep(step, factors, part, tile, schedule)

    def measure(
        self, slice_index: int, squared_norms: SquaredNorms, hyperparameters: GroupHyperparameters
    ) -> ProvisionalFactors:
        """Adds a step's gradient to the second moment of a slice, if a clip coefficient is known.

        Args:
            slice_index: index into `Partition.slices`; one that `applies_to`.
            squared_norms: of the gradient's full rows, with those of rows and columns.
            hyperparameters: of the slice's parameter group.
        """
        body = self._bodies[slice_index]
        assert body is not None
        h = hyperparameters
        factors = self._rank.kernels.factored_step_(
            body.made_moment(), squared_norms, beta2=h.beta2, lr=h.lr, scale=self._factor
        )
        return ProvisionalFactors(slice=slice_index, factors=factors, beta1=h.beta1)

    def apply(
        self, factors: ProvisionalFactors, begin: int, gradient: Tensor, *, age: int, schedule: UpdateSchedule
    ) -> None:
        """Updates a part of a slice's full rows.

        Args:
            factors: result of `measure`.
            begin: first element of the part, counted over the slice's full rows.
            gradient: [rows, width], model dtype; of the part: full rows, or a piece of a single one.
            age: see `Publisher.age`.
            schedule: present S and d of the part.
        """
        body = self._bodies[factors.slice]
        assert body is not None
        weights, row_scale, col_scale = body.weights, factors.factors.row_scale, factors.factors.col_scale
        if gradient.shape != weights.shape:
            row, column = divmod(begin, weights.shape[1])
            rows, width = gradient.shape
            weights = weights.view(-1).narrow(0, begin, rows * width).view(rows, width)
            row_scale, col_scale = row_scale.narrow(0, row, rows), col_scale.narrow(1, column, width)
        size = self._compensation.scale(schedule, factors.beta1, age)
        part = Factors(row_scale=row_scale, col_scale=col_scale, finite=factors.factors.finite)
        self._rank.kernels.provisional_update_(weights, gradient, part, self._noise, size=size)

    def end_step(self, scale: StepScale, loss_scale: float) -> None:
        """Keeps the clip coefficient of a step that was applied."""
        self._clip.copy_(torch.where(scale.finite, scale.factor * loss_scale, self._clip))

    def keep(
        self, step: int, factors: ProvisionalFactors, gradient: Tensor, tile: LateTile, schedule: StaggeredSchedule
    ) -> None:
        """Keeps an update of a tile whose block has a job in flight, to apply it again after the publish; in backward.

        Args:
            step: step of the gradient.
            factors: see `apply`.
            gradient: [rows, width], model dtype, on the weights' device; its memory is reused after this call.
            tile: the tile. Its slot keeps the gradient until a job with `step` is published.
            schedule: present S and d.
        """
        # The memory of a CPU device is the slots'.
        in_slot, kept = runtime_of(self._rank.device).runs_behind, tile.destination.slot
        if in_slot:
            if schedule not in self._keeps_on_device:
                n_bytes = self._rank.partition.numel * self._rank.dtype.itemsize * schedule.kept_share
                self._keeps_on_device[schedule] = has_room(n_bytes, gradient.device)
            if self._keeps_on_device[schedule]:
                in_slot, kept = False, gradient.clone()
        entry = _Kept(step=step, factors=factors, begin=tile.destination.begin, gradient=kept, in_slot=in_slot)
        self._kept.setdefault(tile.block, []).append(entry)

    def published(self, last_steps: Mapping[int, int], schedule: StaggeredSchedule) -> None:
        """Applies kept updates again, and drops those that no other job in flight will overwrite.

        Args:
            last_steps: for each published block the last step that its weights are exact for.
            schedule: present S and d.
        """
        for block, last in last_steps.items():
            later = [kept for kept in self._kept.pop(block, ()) if kept.step > last]
            for kept in later:
                gradient = kept.gradient
                if kept.in_slot:
                    gradient = runtime_of(self._rank.device).to_device(gradient)
                    self._rank.telemetry.traffic.h2d_bytes += gradient.nbytes
                age, of_block = kept.step - last, schedule.of_block(block)
                self.apply(kept.factors, kept.begin, gradient, age=age, schedule=of_block)
            if needed := [kept for kept in later if self._in_flight.overwrites(block, kept.step)]:
                self._kept[block] = needed

    def drop_kept(self) -> None:
        """Drops all kept updates, after a flush."""
        self._kept.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """Second moments, last clip coefficient and position in the rounding noise, on the CPU; None without provisional updates."""
        if not self._compensation.updates_provisionally:
            return None
        return {
            "second_moments": [
                None if body is None or body.moment is None else tuple(t.cpu() for t in body.moment.tensors())
                for body in self._bodies
            ],
            "clip": self._clip.cpu(),
            "noise": self._noise.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`, for the same slices."""
        if state is None:
            return
        for body, saved in zip(self._bodies, state["second_moments"], strict=True):
            if body is not None:
                body.moment = None
                if saved is not None:
                    for ours, theirs in zip(body.made_moment().tensors(), saved, strict=True):
                        ours.copy_(theirs)
        self._clip.copy_(state["clip"])
        self._noise.set_state(state["noise"])


def _body(s: Slice, weights: Tensor) -> _Body | None:
    """Full rows of a slice; None where there are too few: a single row or column has no factored second moment."""
    offset = -s.start % s.columns
    rows = max(0, s.numel - offset) // s.columns
    if not s.is_matrix or rows < 2 or s.columns < 2:
        return None
    return _Body(weights=weights.narrow(0, offset, rows * s.columns).view(rows, s.columns))
