"""The device's passes over gradients and weights, by torch's operations: they run on any device and define the result of each pass.

`kernels.cpu.CpuKernels` overrides them on a CPU and `kernels.triton.TritonKernels` on CUDA. `kernels_for` chooses.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GradientNorms, GroupHyperparameters, StepScale
from lightning_zenflow.kernels.factored import SMALLEST, Factors, RoundingNoise, SecondMoment, round_stochastically_

_log = logging.getLogger(__name__)

_VARIABLE = "ZENFLOW_KERNELS"
"""Environment variable that overrules the choice of `kernels_for`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredNorms:
    """Sums of squares of a gradient, on its device; not finite where the gradient is not.

    Held as the partial sums of the pass over the gradient. The reader of a sum adds them up, for many gradients at once where possible.
    """

    parts: Tensor
    """[n] float32 or float64; together the whole gradient's."""
    per_axis: tuple[Tensor, ...] = ()
    """[n, rows] and [n, columns] float32; nothing without `per_axis`."""

    @property
    def rows(self) -> Tensor:
        """[rows] float32; with `per_axis` only."""
        return self.per_axis[0].sum(0)

    @property
    def columns(self) -> Tensor:
        """[columns] float32; with `per_axis` only."""
        return self.per_axis[1].sum(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Columns of a matrix, such as a tile of a gradient, and the tensor of their entries."""

    columns: Tensor | None
    """[k] int64, on the matrix' device; None: all columns."""
    entries: Tensor
    """[rows, k], contiguous, model dtype, on the matrix' device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """A part of a gradient, either full rows or a range of one row, and the tensors that receive it."""

    begin: int
    """First element, in the flat gradient."""
    slot: Tensor
    """[rows, width], model dtype; host memory, page-locked if the gradient is on a GPU."""
    selection: Selection | None = None

    def part_of(self, gradient: Tensor) -> Tensor:
        """[rows, width]: the part, a view of the gradient."""
        return gradient.view(-1).narrow(0, self.begin, self.slot.numel()).view_as(self.slot)


ColumnWrite = tuple[Tensor, Selection]
"""A matrix, [rows, width], contiguous, model dtype, and what is written to it; the entries are read at each write."""

Copies = AbstractContextManager[None]
"""Context in which slots are written, on a stream of its own if the device has streams."""

IN_ORDER: Copies = nullcontext()
"""Copies to slots in the order of everything else."""


class Kernels:
    """The passes of one step, by torch's operations. Matrices are contiguous, [rows, columns]; no pass synchronises with the device.

    AdamW's order of operations is that of the worker's replay kernel and of DeepSpeedCPUAdam. torch fuses other pairs of operations than
    the kernel, so the two agree to a few units in the last place, not bit for bit.
    """

    def route(
        self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool, copies: Copies = IN_ORDER
    ) -> SquaredNorms:
        """Copies the parts of a gradient to their slots, gathers the selected columns and computes sums of squares.

        Args:
            gradient: [rows, columns], model dtype.
            destinations: disjoint parts of the gradient.
            per_axis: adds the sums of each row and of each column; the total has the same bits with and without.
            copies: context in which the slots are written.
        """
        self.copy_parts(gradient, destinations, copies)
        # The total is the sum of the rows' in float64: torch's float32 sums over long vectors are off by 1e-5.
        rows = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)
        parts = rows.double().square().sum(0, keepdim=True)
        if not per_axis:
            return SquaredNorms(parts=parts)
        columns = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=torch.float32)
        return SquaredNorms(parts=parts, per_axis=(rows.square_().unsqueeze(0), columns.square_()))

    def copy_parts(self, gradient: Tensor, destinations: Sequence[Destination], copies: Copies) -> None:
        """What `route` does but for the sums."""
        with copies:
            for destination in destinations:
                destination.slot.copy_(destination.part_of(gradient), non_blocking=True)
        self.select_parts(gradient, destinations)

    def select_parts(self, gradient: Tensor, destinations: Sequence[Destination]) -> None:
        """Gathers the selected columns of a gradient."""
        for destination in destinations:
            if destination.selection is not None:
                self.select(destination.part_of(gradient), destination.selection)

    def select(self, part: Tensor, selection: Selection) -> None:
        """Copies columns of a part of a gradient, [rows, width], to the selection's entries."""
        columns = selection.columns
        selection.entries.copy_(part if columns is None else part.index_select(1, columns))

    def factored_step_(
        self, moment: SecondMoment, squared_norms: SquaredNorms, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        """Adds a step's gradient to its second moment and returns the factors of its provisional update, see `kernels.factored`.

        Args:
            moment: changed in place, unless the gradient or `scale` is not finite.
            squared_norms: of the gradient, with those of rows and columns.
            beta2: decay per step.
            lr: learning rate.
            scale: 0-D float32; factor on the gradient; NaN if it is not known.

        Returns:
            Factors whose product is lr * scale / sqrt(v_ij), bias-corrected.
        """
        rows, columns = squared_norms.rows, squared_norms.columns
        # In float32, like the operations below: float64 would not see squares that overflow there.
        finite = torch.isfinite(columns.sum() * scale)
        weight = (1 - beta2) * finite.float()
        squared = scale.square()
        row, col = moment.row, moment.col
        row.lerp_(torch.where(finite, rows * (squared / col.numel()), 0.0), weight)
        col.lerp_(torch.where(finite, columns * (squared / row.numel()), 0.0), weight)
        moment.n.add_(finite)
        bias_correction = 1 - beta2 ** moment.n.clamp(min=1)
        row_scale = row.clamp(min=SMALLEST).rsqrt_().mul_((col.mean() * bias_correction).sqrt()).mul_(scale * lr)
        col_scale = col.clamp(min=SMALLEST).rsqrt_()
        return Factors(row_scale=row_scale.unsqueeze(1), col_scale=col_scale.unsqueeze(0), finite=finite)

    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        """Applies w <- round(w - g * (row_scale * size) * col_scale), see `kernels.factored`.

        Args:
            weights: [rows, columns], model dtype; changed in place.
            gradient: [rows, columns], model dtype.
            factors: row_scale, col_scale and finite.
            noise: random bits for stochastic rounding.
            size: b, the size of the provisional update.
        """
        update = gradient.float() * (factors.row_scale * size)
        update.mul_(factors.col_scale)
        values = torch.sub(weights.float(), torch.where(factors.finite, update, 0.0), out=update)
        round_stochastically_(weights, values, noise)

    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        """Applies one exact step in place, without synchronisation: the device itself decides whether the step is applied.

        With g = gradient * factor (plus weight_decay * w for Adam), s = count:
        m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;
        w <- (1 - lr weight_decay) w - lr / (1 - beta1^s) * m / (sqrt(v / (1 - beta2^s)) + eps).

        Args:
            state: [3, n] float32: master weights, first and second moments; changed in place.
            gradient: [n], model dtype.
            weights: [n], model dtype; receives the rounded master weights. May be `gradient` itself.
            h: hyperparameters of the parameter group.
            scale: factor on the gradient and number of applied steps.
        """
        (master, exp_avg, exp_avg_sq), finite = state, scale.finite
        one = torch.ones_like(scale.count)
        step_size, inv_sqrt_bias_correction2 = scale.coefficients(h)
        g = torch.where(finite, gradient.float() * scale.factor, 0.0)
        if h.weight_decay != 0 and not h.decoupled:
            g = torch.where(finite, torch.add(g, master, alpha=h.weight_decay), 0.0)
        exp_avg.mul_(torch.where(finite, one * h.beta1, one)).add_(g, alpha=1 - h.beta1)
        exp_avg_sq.mul_(torch.where(finite, one * h.beta2, one)).addcmul_(g, g, value=1 - h.beta2)
        denominator = exp_avg_sq.sqrt().mul_(inv_sqrt_bias_correction2).add_(h.eps)
        update = torch.div(exp_avg, denominator, out=denominator)
        if h.weight_decay != 0 and h.decoupled:
            master.mul_(torch.where(finite, one * (1 - h.lr * h.weight_decay), one))
        master.sub_(torch.where(finite, update.mul_(step_size), 0.0))
        weights.copy_(master)

    def block_word(self, norms: GradientNorms, block: int) -> Tensor:
        """`GradientNorms.word`, which also changes `sum` and the block's `partial`."""
        return norms.word(block)

    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        """Returns a function that does matrix[:, columns] <- entries for all writes; prepared once, called in every step."""
        some = [(matrix, s.columns, s.entries) for matrix, s in writes if s.columns is not None]
        targets = [matrix for matrix, s in writes if s.columns is None]
        sources = [s.entries for _, s in writes if s.columns is None]

        def write() -> None:
            for matrix, columns, entries in some:
                matrix.index_copy_(1, columns, entries)
            if targets:
                # Biases and norms are many and small: one call for all of them.
                torch._foreach_copy_(targets, sources)

        return write


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation on a device, or the one that ``ZENFLOW_KERNELS`` names: "torch", "triton" or "cpu".

    Triton that cannot compile or run its kernels is replaced by torch, with a warning.

    Raises:
        ValueError: the variable has another value, or names "cpu" for another device.
    """
    name = os.environ.get(_VARIABLE) or {"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch")
    if name not in ("torch", "triton", "cpu"):
        raise ValueError(f"{_VARIABLE} must be torch, triton or cpu, or not be set, got {name!r}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"{_VARIABLE} must be torch or triton for training on {device.type}, got 'cpu'")
    # Imported on demand: not every installation has Triton, and a GPU run does not need the compiled library.
    if name == "cpu":
        from lightning_zenflow.kernels.cpu import CpuKernels

        return CpuKernels()
    if name == "triton":
        try:
            from lightning_zenflow.kernels.triton import TritonKernels

            kernels = TritonKernels()
            # The first launch compiles Triton's own launcher, for which it needs a C compiler and Python's headers.
            _launch_all(kernels, device)
            return kernels
        # Triton raises what its parts raise: missing files, compilers that fail, drivers.
        except Exception as error:
            _log.warning(
                "ZenFlow: Triton's kernels cannot be used, torch's are (slower by many launches in each step): %s: %s."
                " Triton needs a C compiler and Python's headers; %s=torch silences this warning",
                type(error).__name__,
                error,
                _VARIABLE,
            )
    return Kernels()


def _launch_all(kernels: Kernels, device: torch.device) -> None:
    """Launches each pass once, since each is compiled at its first launch and an error there would end training."""
    one = torch.ones((), dtype=torch.float32, device=device)
    matrix = torch.zeros(2, 2, dtype=torch.bfloat16, device=device)
    column = torch.zeros(1, dtype=torch.int64, device=device)
    selection = Selection(columns=column, entries=torch.zeros_like(matrix[:, :1]))
    norms = kernels.route(matrix, (), per_axis=True)
    factors = kernels.factored_step_(SecondMoment.zeros(2, 2, device), norms, beta2=0.5, lr=0.0, scale=one)
    kernels.provisional_update_(matrix, matrix, factors, RoundingNoise(0, device))
    kernels.select(matrix, selection)
    kernels.column_writer([(matrix, selection)])()
    h = GroupHyperparameters(lr=0.0, beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.0, decoupled=True)
    scale = StepScale(factor=one, finite=one.bool(), norm=one, count=one.double())
    kernels.adamw_(torch.zeros(3, 4, dtype=torch.float32, device=device), matrix.view(-1), matrix.view(-1), h, scale)
    norms_so_far = GradientNorms(1, device)
    norms_so_far.open(1, max_norm=1.0, loss_scale=1.0)
    kernels.block_word(norms_so_far, 0)
