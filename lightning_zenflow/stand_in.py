"""Owner of the provisional update's state: factored second moments, rounding noise and the last step's clip coefficient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.auto_schedule import Pace
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.kernels import Kernels, Statistics
from lightning_zenflow.partition import Partition, Slice
from lightning_zenflow.prediction import Prediction
from lightning_zenflow.provisional import Factors, RoundingNoise, SecondMoment

_SEED = 20251205


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """The full rows of one slice, and the second moment of their gradient."""

    weights: Tensor
    """[rows, columns]; of the model."""
    moment: SecondMoment


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A provisional update of one slice, but for its size and the gradient."""

    slice: int
    """Index into `Partition.slices`."""
    factors: Factors
    """Of the slice's full rows."""
    beta1: float
    """Decay of the first moment in the step."""


class StandIn:
    """Applies provisional updates to the host-owned weights of a rank during backward.

    Matrices only, and of them full rows: the at most two rows that ZeRO's partition cuts wait for their publish like everything else did
    before. Device-owned entries are moved too, and overwritten by their exact values in the same step.

    Args:
        partition: the rank's partition.
        weights: for each parameter group, the rank's flat partition of the model's weights.
        prediction: how far to move.
        pace: reads the present S and d.
        rank: ranks round differently.
        kernels: passes over the gradient.
        hyperparameters: reads those of the present step.
    """

    def __init__(
        self,
        partition: Partition,
        weights: Sequence[Tensor],
        *,
        prediction: Prediction,
        pace: Callable[[], Pace],
        rank: int,
        kernels: Kernels,
        hyperparameters: Callable[[], Sequence[GroupHyperparameters]],
    ) -> None:
        device = weights[0].device
        self._slices = partition.slices
        self._prediction = prediction
        self._pace = pace
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

    def measure(self, slice_index: int, statistics: Statistics) -> Move:
        """Takes a step's gradient into the second moment of a slice; the first part of a provisional update.

        Args:
            slice_index: index into `Partition.slices`; one that it `moves`.
            statistics: of the gradient's full rows, of the whole step.
        """
        body = self._bodies[slice_index]
        assert body is not None and statistics.rows is not None and statistics.columns is not None
        h = self._hyperparameters()[self._slices[slice_index].param_group]
        factors = self._kernels.factored_step_(
            body.moment, statistics.rows, statistics.columns, beta2=h.beta2, lr=h.lr, scale=self._factor
        )
        return Move(slice=slice_index, factors=factors, beta1=h.beta1)

    def apply(self, move: Move, begin: int, gradient: Tensor, age: int) -> None:
        """Moves a part of a slice's full rows; the second part of a provisional update.

        Args:
            move: what `measure` has returned.
            begin: the part's first element, counted over the slice's full rows.
            gradient: [rows, width], model dtype; the part's: rows, or a piece of a single one.
            age: see `Rounds.gradient_age`; of the weights that are moved.
        """
        body = self._bodies[move.slice]
        assert body is not None
        weights, of_rows, of_columns = body.weights, move.factors.of_rows, move.factors.of_columns
        if gradient.shape != weights.shape:
            row, column = divmod(begin, weights.shape[1])
            rows, width = gradient.shape
            weights = weights.view(-1).narrow(0, begin, rows * width).view(rows, width)
            of_rows, of_columns = of_rows.narrow(0, row, rows), of_columns.narrow(1, column, width)
        size = self._prediction.scale(self._pace(), move.beta1, age)
        self._kernels.stand_in_(weights, gradient, of_rows, of_columns, self._noise, move.factors.finite, size=size)


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
