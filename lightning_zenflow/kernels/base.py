"""What the device does with gradients in every step, as passes over memory; one implementation per kind of device.

The torch implementation runs everywhere and says what each pass means. On a CPU compiled ones take its place, on CUDA Triton's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.factored import Factors, RoundingNoise, SecondMoment, factored_step_


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredNorms:
    """Sums of squares of a gradient, on its device; not finite where the gradient is not."""

    total: Tensor
    """0-D float64."""
    rows: Tensor | None
    """[rows] float32; None if only the total was asked for."""
    columns: Tensor | None
    """[columns] float32; likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Columns of a rectangle, and where their entries go."""

    columns: Tensor | None
    """[k] int64, on the gradient's device; None: all of them."""
    target: Tensor
    """[rows, k], model dtype, on the gradient's device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a part of a gradient goes: full rows, or a piece of a single one."""

    begin: int
    """First element, in the flat gradient."""
    slot: Tensor
    """[rows, width], model dtype; host memory, page-locked where the gradient is on a GPU."""
    selections: Sequence[Selection] = ()

    def part_of(self, gradient: Tensor) -> Tensor:
        """The part that goes here, [rows, width], a view of the gradient."""
        return gradient.view(-1).narrow(0, self.begin, self.slot.numel()).view_as(self.slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnWrite:
    """Where selected entries go."""

    matrix: Tensor
    """[rows, width], contiguous, model dtype."""
    columns: Tensor | None
    """[k] int64; None: all of them."""
    selected: Tensor
    """[rows, k], contiguous, model dtype; what it holds when it is written."""


class Kernels(ABC):
    """The passes. Matrices are contiguous, [rows, columns]; nothing waits for the device."""

    def route(self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool) -> SquaredNorms:
        """Everything that is done with a gradient when it arrives: copied, selected from, measured.

        Args:
            gradient: [rows, columns], model dtype.
            destinations: of its parts, disjoint.
            per_axis: as for `squared_norms`.
        """
        for destination in destinations:
            part = destination.part_of(gradient)
            destination.slot.copy_(part, non_blocking=True)
            self.select(part, destination.selections)
        return self.squared_norms(gradient, per_axis=per_axis)

    def select(self, part: Tensor, selections: Sequence[Selection]) -> None:
        """Copies columns of a part of a gradient, [rows, width]."""
        for selection in selections:
            if selection.columns is None:
                selection.target.copy_(part)
            else:
                self.gather_columns(part, selection.columns, selection.target)

    @abstractmethod
    def squared_norms(self, gradient: Tensor, *, per_axis: bool) -> SquaredNorms:
        """Sums of squares.

        Args:
            gradient: [rows, columns], model dtype.
            per_axis: whether those of rows and columns are wanted as well; the total has the same bits either way.
        """

    def factored_step_(
        self, moment: SecondMoment, rows: Tensor, columns: Tensor, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        """See `provisional.factored_step_`; the sums of squares of rows and columns as in `SquaredNorms`."""
        return factored_step_(moment, rows, columns, beta2=beta2, lr=lr, scale=scale)

    @abstractmethod
    def provisional_update_(
        self,
        weights: Tensor,
        gradient: Tensor,
        row_scale: Tensor,
        col_scale: Tensor,
        noise: RoundingNoise,
        finite: Tensor,
        *,
        size: float = 1.0,
    ) -> None:
        """Does w <- round(w - g * (row_scale * size) * col_scale), see `provisional`.

        Args:
            weights: [rows, columns], model dtype; changed in place.
            gradient: [rows, columns], model dtype.
            row_scale: [rows, 1] float32.
            col_scale: [1, columns] float32.
            noise: for stochastic rounding.
            finite: 0-D bool; where False nothing changes.
            size: b of `provisional`.
        """

    @abstractmethod
    def adamw_(
        self,
        state: Tensor,
        gradient: Tensor,
        weights: Tensor,
        *,
        hyperparameters: GroupHyperparameters,
        count: Tensor,
        scale: StepScale,
    ) -> None:
        """One exact step, see `adamw.adamw_step_`.

        Args:
            state: [3, n] float32: master weights, first and second moments; changed in place.
            gradient: [n], model dtype.
            weights: [n], model dtype; receives the new master weights. May be `gradient`.
            hyperparameters: of the parameter group.
            count: 0-D float64; number of applied steps, this one included if it is applied.
            scale: of the step.
        """

    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        """Returns what does matrix[:, columns] <- selected for all of them whenever it is called; every step repeats them."""
        some = [(w.matrix, w.columns, w.selected) for w in writes if w.columns is not None]
        whole = [(w.matrix, w.selected) for w in writes if w.columns is None]
        targets, sources = [target for target, _ in whole], [source for _, source in whole]

        def write() -> None:
            for matrix, columns, selected in some:
                self.scatter_columns(matrix, columns, selected)
            if whole:
                # Biases and norms are many and small: one call for all of them.
                torch._foreach_copy_(targets, sources)

        return write

    @abstractmethod
    def gather_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        """Does selected <- matrix[:, columns]; [rows, width], [k] int64, [rows, k]."""

    @abstractmethod
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        """Does matrix[:, columns] <- selected; shapes as in `gather_columns`."""
