"""What the device does with gradients in every step, as passes over memory; one implementation per kind of device.

The torch implementation runs everywhere and says what each pass means. On a CPU compiled ones take its place, on CUDA Triton's.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.adamw import adamw_step_
from lightning_zenflow.clipping import StepScale
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.provisional import (
    Factors,
    RoundingNoise,
    SecondMoment,
    factored_step_,
    provisional_values,
    round_stochastically_,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
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
    page: Tensor
    """[rows, width], model dtype; host memory, page-locked where the gradient is on a GPU."""
    selections: Sequence[Selection] = ()

    def part_of(self, gradient: Tensor) -> Tensor:
        """The part that goes here, [rows, width], a view of the gradient."""
        return gradient.view(-1).narrow(0, self.begin, self.page.numel()).view_as(self.page)


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

    def take(self, gradient: Tensor, destinations: Sequence[Destination], *, directions: bool) -> Statistics:
        """Everything that is done with a gradient when it arrives: copied, selected from, measured.

        Args:
            gradient: [rows, columns], model dtype.
            destinations: of its parts, disjoint.
            directions: as for `statistics`.
        """
        for destination in destinations:
            part = destination.part_of(gradient)
            destination.page.copy_(part, non_blocking=True)
            self.select(part, destination.selections)
        return self.statistics(gradient, directions=directions)

    def select(self, part: Tensor, selections: Sequence[Selection]) -> None:
        """Copies columns of a part of a gradient, [rows, width]."""
        for selection in selections:
            if selection.columns is None:
                selection.target.copy_(part)
            else:
                self.gather_columns(part, selection.columns, selection.target)

    @abstractmethod
    def statistics(self, gradient: Tensor, *, directions: bool) -> Statistics:
        """Sums of squares.

        Args:
            gradient: [rows, columns], model dtype.
            directions: whether those of rows and columns are wanted as well; the total has the same bits either way.
        """

    def factored_step_(
        self, moment: SecondMoment, rows: Tensor, columns: Tensor, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        """See `provisional.factored_step_`; the sums of squares of rows and columns as in `Statistics`."""
        return factored_step_(moment, rows, columns, beta2=beta2, lr=lr, scale=scale)

    @abstractmethod
    def stand_in_(
        self,
        weights: Tensor,
        gradient: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        noise: RoundingNoise,
        finite: Tensor,
        *,
        size: float = 1.0,
    ) -> None:
        """Does w <- round(w - g * (of_rows * size) * of_columns), see `provisional`.

        Args:
            weights: [rows, columns], model dtype; changed in place.
            gradient: [rows, columns], model dtype.
            of_rows: [rows, 1] float32.
            of_columns: [1, columns] float32.
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


class TorchKernels(Kernels):
    """By torch's operations, on any device."""

    @override
    def statistics(self, gradient: Tensor, *, directions: bool) -> Statistics:
        # The total from the rows: over long runs torch's sums in float are off by 1e-5.
        rows = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)
        total = rows.double().square().sum()
        if not directions:
            return Statistics(total=total, rows=None, columns=None)
        columns = torch.linalg.vector_norm(gradient, dim=0, dtype=torch.float32)
        return Statistics(total=total, rows=rows.square_(), columns=columns.square_())

    @override
    def stand_in_(
        self,
        weights: Tensor,
        gradient: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        noise: RoundingNoise,
        finite: Tensor,
        *,
        size: float = 1.0,
    ) -> None:
        values = provisional_values(weights, gradient, of_rows * size, of_columns, finite=finite)
        round_stochastically_(weights, values, noise)

    @override
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
        master, exp_avg, exp_avg_sq = state
        adamw_step_(
            master,
            exp_avg,
            exp_avg_sq,
            gradient,
            hyperparameters=hyperparameters,
            count=count,
            factor=scale.factor,
            finite=scale.finite,
        )
        weights.copy_(master)

    @override
    def gather_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        selected.copy_(matrix.index_select(1, columns))

    @override
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        matrix.index_copy_(1, columns, selected)


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation for a device. Imported here: neither the library nor Triton is there for every device."""
    if device.type == "cpu":
        from lightning_zenflow.cpu_kernels import CpuKernels

        return CpuKernels()
    # torch for CUDA brings it along, but not on every platform.
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lightning_zenflow.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()
