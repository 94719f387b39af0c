"""Owner of the provisional update's state: factored second moments, rounding noise and the last step's clip coefficient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, Slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.kernels.base import Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import Factors, RoundingNoise, SecondMoment
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.worker.memory import has_room

_SEED = 20251205


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """The full rows of one slice, and the second moment of their gradient."""

    weights: Tensor
    """[rows, columns]; of the model."""
    moment: SecondMoment


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionalStep:
    """A provisional update of one slice, but for its size and the gradient."""

    slice: int
    """Index into `Partition.slices`."""
    factors: Factors
    """Of the slice's full rows."""
    beta1: float
    """Decay of the first moment in the step."""


class ProvisionalUpdate:
    """Applies provisional updates to the host-owned weights of a rank during backward.

    Matrices only, and of them full rows: the at most two rows that ZeRO's partition cuts wait for their publish like everything else did
    before. Device-owned entries are moved too, and overwritten by their exact values in the same step.

    Args:
        partition: the rank's partition.
        weights: for each parameter group, the rank's flat partition of the model's weights.
        prediction: how far to move.
        schedule: reads the present S and d.
        rank: ranks round differently.
        kernels: passes over the gradient.
        hyperparameters: reads those of the present step.
    """

    def __init__(
        self,
        partition: Partition,
        weights: Sequence[Tensor],
        *,
        prediction: StalenessCompensation,
        schedule: Callable[[], UpdateSchedule],
        rank: int,
        kernels: Kernels,
        hyperparameters: Callable[[], Sequence[GroupHyperparameters]],
    ) -> None:
        device = weights[0].device
        self._slices = partition.slices
        self._prediction = prediction
        self._schedule = schedule
        self._kernels = kernels
        self._hyperparameters = hyperparameters
        self._noise = RoundingNoise(_SEED + rank, device)
        self._factor = torch.ones((), device=device)
        self._bodies: list[_Body | None] = [
            _body(s, weights[s.param_group].narrow(0, s.begin - partition.group_begins[s.param_group], s.numel))
            for s in partition.slices
        ]

    def end_step(self, factor: Tensor, finite: Tensor) -> None:
        """Remembers the factor (0-D float32) of the last step that was applied."""
        self._factor.copy_(torch.where(finite, factor, self._factor))

    def state_dict(self) -> dict[str, Any]:
        """Second moments, the last coefficient and the noise generator."""
        return {
            "bodies": [None if body is None else body.moment.tensors() for body in self._bodies],
            "factor": self._factor,
            "noise": self._noise.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, for the same slices."""
        for body, saved in zip(self._bodies, state["bodies"], strict=True):
            if body is not None:
                for ours, theirs in zip(body.moment.tensors(), saved, strict=True):
                    ours.copy_(theirs)
        self._factor.copy_(state["factor"])
        self._noise.set_state(state["noise"])

    def moves(self, slice_index: int) -> bool:
        """Whether a slice has anything to move."""
        return self._bodies[slice_index] is not None

    def measure(self, slice_index: int, squared_norms: SquaredNorms) -> ProvisionalStep:
        """Takes a step's gradient into the second moment of a slice; the first part of a provisional update.

        Args:
            slice_index: index into `Partition.slices`; one that it `moves`.
            squared_norms: of the gradient's full rows, of the whole step.
        """
        body = self._bodies[slice_index]
        assert body is not None and squared_norms.rows is not None and squared_norms.columns is not None
        h = self._hyperparameters()[self._slices[slice_index].param_group]
        factors = self._kernels.factored_step_(
            body.moment, squared_norms.rows, squared_norms.columns, beta2=h.beta2, lr=h.lr, scale=self._factor
        )
        return ProvisionalStep(slice=slice_index, factors=factors, beta1=h.beta1)

    def apply(self, move: ProvisionalStep, begin: int, gradient: Tensor, age: int) -> None:
        """Moves a part of a slice's full rows; the second part of a provisional update.

        Args:
            move: what `measure` has returned.
            begin: the part's first element, counted over the slice's full rows.
            gradient: [rows, width], model dtype; the part's: rows, or a piece of a single one.
            age: see `JobQueue.gradient_age`; of the weights that are moved.
        """
        body = self._bodies[move.slice]
        assert body is not None
        weights, row_scale, col_scale = body.weights, move.factors.row_scale, move.factors.col_scale
        if gradient.shape != weights.shape:
            row, column = divmod(begin, weights.shape[1])
            rows, width = gradient.shape
            weights = weights.view(-1).narrow(0, begin, rows * width).view(rows, width)
            row_scale, col_scale = row_scale.narrow(0, row, rows), col_scale.narrow(1, column, width)
        size = self._prediction.scale(self._schedule(), move.beta1, age)
        self._kernels.provisional_update_(
            weights, gradient, row_scale, col_scale, self._noise, move.factors.finite, size=size
        )


def _body(s: Slice, weights: Tensor) -> _Body | None:
    """The slice's full rows, if it has any worth it: a single row or column has no factored second moment."""
    offset = -s.start % s.columns
    rows = max(0, s.numel - offset) // s.columns
    if not s.is_matrix or rows < 2 or s.columns < 2:
        return None
    return _Body(
        weights=weights.narrow(0, offset, rows * s.columns).view(rows, s.columns),
        moment=SecondMoment.zeros(rows, s.columns, weights.device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One move of a part of a slice."""

    step: int
    move: ProvisionalStep
    begin: int
    gradient: Tensor
    """[rows, width], on the device or in page-locked host memory."""


class ReapplyAfterPublish:
    """Repeats moves of later steps after a publish, in their order.

    A round that is published d steps after its window closed overwrites the weights with the exact state of its own steps. What the
    stand-in had moved in the d steps since then would be lost until the next publish: S steps later. Only blocks with a round in flight
    are concerned, so the gradients to be kept are d / S times the model's. They stay on the device where it has room; otherwise they come
    back from the slots in host memory, which on a CPU are read where they are.

    Args:
        provisional: moves weights; None: nothing is ever kept.
        n_bytes: of all of the rank's gradients.
        schedule: the present S and d.
        traffic: where copied bytes are counted.
    """

    def __init__(
        self,
        provisional: ProvisionalUpdate | None,
        n_bytes: int,
        schedule: Callable[[], UpdateSchedule],
        traffic: Traffic,
    ) -> None:
        self._provisional = provisional
        self._n_bytes = n_bytes
        self._schedule = schedule
        self._traffic = traffic
        self._on_device: dict[UpdateSchedule, bool] = {}
        self._kept: dict[int, list[_Kept]] = {}

    def keep(self, block: int, step: int, move: ProvisionalStep, begin: int, gradient: Tensor, slot: Tensor) -> None:
        """Remembers a move of a part of a block that has a round in flight; in backward.

        Args:
            block: index into `Partition.blocks`.
            step: the gradient's.
            move: see `ProvisionalUpdate.apply`; so is `begin`.
            begin: see there.
            gradient: [rows, width], model dtype, on the weights' device; its memory is used again after this call.
            slot: the same on the host; stays as it is until a round with `step` is published, since it belongs to that round.
        """
        if gradient.device != slot.device:
            schedule = self._schedule()
            if schedule not in self._on_device:
                n_bytes = self._n_bytes * schedule.publish_lag / schedule.update_interval
                self._on_device[schedule] = has_room(n_bytes, gradient.device)
            if self._on_device[schedule]:
                slot = gradient.clone()
        kept = _Kept(step=step, move=move, begin=begin, gradient=slot)
        self._kept.setdefault(block, []).append(kept)

    def published(self, last_steps: Mapping[int, int]) -> None:
        """Moves what was just overwritten.

        Args:
            last_steps: for each published block the last step that its weights are exact for.
        """
        for block, last in last_steps.items():
            later = [kept for kept in self._kept.pop(block, ()) if kept.step > last]
            for kept in later:
                assert self._provisional is not None, "it has made the move"
                gradient = kept.gradient.to(kept.move.factors.row_scale.device, non_blocking=True)
                if gradient is not kept.gradient:
                    self._traffic.h2d_bytes += gradient.numel() * gradient.element_size()
                self._provisional.apply(kept.move, kept.begin, gradient, kept.step - last)
            if later:
                self._kept[block] = later

    def clear(self) -> None:
        """Forgets everything, after a flush."""
        self._kept.clear()
