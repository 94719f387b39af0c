"""The passes on a CUDA device, each fused into one Triton kernel of `kernels.triton_device`.

A launch costs about as much as a pass over a small matrix, so each pass is one launch, and leaves its partial sums to the next one. Each
reads and writes memory once; torch needs three to thirty passes. With ``TRITON_INTERPRET=1`` set before Triton's import, the kernels run on
a CPU.
"""

import math
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.step_inputs import GradientNorms, GroupHyperparameters, StepScale
from lightning_zenflow.kernels import triton_device as device
from lightning_zenflow.kernels.base import (
    DONE_NUMEL,
    IN_ORDER,
    SMALLEST,
    Copies,
    Destination,
    Elements,
    Factors,
    Kernels,
    RoundingNoise,
    SecondMoment,
    Selection,
    SquaredNorms,
)

_ELEMENTS, _LARGE_MATRIX = 1 << 14, 1 << 24
"""Elements of one program of the sums, in matrices of at most `_LARGE_MATRIX` elements. In larger ones a program has more rows, so that
there are about 2^10 of them at most, and `factored_step` has little to read."""

_ROWS, _COLUMNS = device.ROWS.value, device.COLUMNS.value


class TritonKernels(Kernels):
    """One kernel a pass. Passes allocate their results and partial sums, nothing else."""

    @override
    def route(
        self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool, copies: Copies = IN_ORDER
    ) -> SquaredNorms:
        """One launch besides the copies and the selections."""
        self.copy_parts(gradient, destinations, copies)
        self.select_parts(gradient, destinations)
        n_rows, n_columns = gradient.shape
        n_tiles = _ELEMENTS // (_ROWS * _COLUMNS) * triton.cdiv(gradient.numel(), _LARGE_MATRIX)
        n_groups, n_strips = triton.cdiv(n_rows, _ROWS * n_tiles), triton.cdiv(n_columns, _COLUMNS)
        parts = torch.empty(n_groups * n_strips, dtype=torch.float32, device=gradient.device)
        row_parts = column_parts = parts
        if per_axis:
            row_parts = torch.empty(n_strips, n_rows, dtype=torch.float32, device=gradient.device)
            column_parts = torch.empty(n_groups, n_columns, dtype=torch.float32, device=gradient.device)
        device.sum_squares[(parts.numel(),)](
            gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles,
            per_axis=per_axis, enable_fp_fusion=False,
        )  # fmt: skip
        return SquaredNorms(parts=parts, per_axis=(row_parts, column_parts) if per_axis else ())

    @override
    def factored_step_(
        self, moment: SecondMoment, squared_norms: SquaredNorms, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        row_parts, column_parts = squared_norms.per_axis
        (n_row_parts, n_rows), (n_column_parts, n_columns) = row_parts.shape, column_parts.shape
        factors = Factors(
            row_scale=torch.empty(n_rows, 1, dtype=torch.float32, device=scale.device),
            col_scale=torch.empty(1, n_columns, dtype=torch.float32, device=scale.device),
            finite=torch.empty((), dtype=torch.bool, device=scale.device),
        )
        device.factored_step[(1,)](
            squared_norms.parts, row_parts, column_parts, *moment,
            factors.row_scale, factors.col_scale, factors.finite, scale,
            squared_norms.parts.numel(), n_row_parts, n_column_parts, n_rows, n_columns,
            1 - beta2, math.log(beta2) if beta2 > 0 else -math.inf, lr, SMALLEST,
            num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
        return factors

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        n_rows, n_columns = weights.shape
        stochastic = weights.dtype == torch.bfloat16
        # Drawn for stochastic rounding only, as torch's passes do: the sequence of draws is part of the run's reproducible state.
        bits = noise.draw_tile() if stochastic else weights
        n_strips = triton.cdiv(n_columns, _COLUMNS)
        device.provisional_update[(triton.cdiv(n_rows, _ROWS) * n_strips,)](
            weights, gradient, factors.row_scale.contiguous(), size, factors.col_scale.contiguous(), bits, factors.finite,
            n_rows, n_columns, n_strips,
            noise_mask=bits.numel() - 1 if stochastic else 0, stochastic=stochastic, aligned=n_columns % 16 == 0,
            enable_fp_fusion=False,
        )  # fmt: skip

    adamw_is_repeatable = True

    @override
    def adamw_(self, elements: Elements, h: GroupHyperparameters, scale: StepScale, number: int) -> None:
        if h.weight_decay == 0:
            decay, decay_factor = device.NO_DECAY, 0.0
        elif h.decoupled:
            decay, decay_factor = device.DECAY_OF_WEIGHT, -h.lr * h.weight_decay
        else:
            decay, decay_factor = device.DECAY_OF_GRADIENT, h.weight_decay
        step_size, inv_sqrt_bias_correction2 = scale.coefficients(h)
        n = elements.gradient.numel()
        device.adamw[(triton.cdiv(n, DONE_NUMEL),)](
            *elements.state, elements.gradient, elements.weights, n,
            scale.factor, scale.finite, step_size, inv_sqrt_bias_correction2,
            h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, decay_factor, elements.done, number,
            decay=decay.value, enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def block_word(self, norms: GradientNorms, block: int) -> Tensor:
        word = norms.sum.new_empty(2, dtype=torch.int64)
        new = {parts.dtype: parts for parts in norms.take_new()}
        singles, doubles = (new.get(t, norms.sum.new_empty(0, dtype=t)) for t in (torch.float32, torch.float64))
        clips, inverse_scale = norms.learns or bool(norms.max_norm > 0), 1.0 if norms.learns else 1.0 / norms.loss_scale
        device.block_word[(1,)](
            singles, len(singles), doubles, len(doubles), norms.sum, norms.partial, norms.ratio, norms.expected,
            word, block, norms.step, norms.max_norm, norms.loss_scale, inverse_scale,
            clips=clips, speculates=norms.speculates, learns=norms.learns, enable_fp_fusion=False,
        )  # fmt: skip
        return word.view(torch.int32)

    @override
    def column_writer(self, writes: Sequence[tuple[Tensor, Selection]]) -> Callable[[], None]:
        writes = [(matrix, s) for matrix, s in writes if s.entries.numel()]
        if not writes:
            return lambda: None
        rows = []
        for matrix, s in writes:
            columns, n_indices = (0, 0) if s.columns is None else (s.columns.data_ptr(), s.columns.numel())
            sizes = n_indices, *matrix.shape, s.entries.shape[1]
            rows.append((matrix.data_ptr(), columns, s.entries.data_ptr(), *sizes))
        rectangle = torch.tensor([device.COPY_ROWS.value, device.COPY_COLUMNS.value], dtype=torch.int64, device="cpu")
        shapes = torch.tensor([s.entries.shape for _, s in writes], dtype=torch.int64, device="cpu")
        # Each program has the number of its write, and its own in that write.
        n_programs = (-(-shapes // rectangle)).prod(1)
        of_write = torch.repeat_interleave(n_programs)
        first = (n_programs.cumsum(0) - n_programs)[of_write]
        programs = torch.stack([of_write, torch.arange(len(first), dtype=torch.int64, device="cpu") - first], dim=1)
        runtime = runtime_of(writes[0][0].device)
        # In stream order, without waiting for the device.
        tables = [
            runtime.empty_on_host(table.shape, table.dtype).copy_(table).to(runtime.device, non_blocking=True)
            for table in (torch.tensor(rows, dtype=torch.int64, device="cpu"), programs)
        ]

        def write() -> None:
            # The tables hold addresses in the tensors of `writes`, which must live as long as this function.
            device.write_columns[(len(tables[1]),)](*tables, writes[0][0], enable_fp_fusion=False)

        return write


def kernels_that_run(device: torch.device) -> TritonKernels:
    """The kernels, each of them launched once on a device. The first launch compiles it, and Triton's own launcher, for which it needs a C
    compiler and Python's headers; an error in a later one would end training.
    """
    kernels, one = TritonKernels(), torch.ones((), dtype=torch.float32, device=device)
    matrix = torch.zeros(2, 2, dtype=torch.bfloat16, device=device)
    column = torch.zeros(1, dtype=torch.int64, device=device)
    selection = Selection(columns=column, entries=torch.zeros_like(matrix[:, :1]))
    norms = kernels.route(matrix, (), per_axis=True)
    factors = kernels.factored_step_(SecondMoment.zeros(2, 2, device), norms, beta2=0.5, lr=0.0, scale=one)
    kernels.provisional_update_(matrix, matrix, factors, RoundingNoise(0, device))
    kernels.column_writer([(matrix, selection)])()
    h = GroupHyperparameters(lr=0.0, beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.0, decoupled=True)
    scale = StepScale(factor=one, finite=one.bool(), norm=one, count=one.double())
    state, weights = torch.zeros(3, 4, dtype=torch.float32, device=device), matrix.view(-1)
    kernels.adamw_(Elements.of(state, weights, weights), h, scale, 1)
    norms_so_far = GradientNorms(1, device)
    norms_so_far.open(1, max_norm=1.0, loss_scale=1.0)
    kernels.block_word(norms_so_far, 0)
    return kernels
