"""The passes on a CUDA device, each fused into one Triton kernel.

Each pass reads and writes memory once, without temporary tensors; torch needs three to fifteen passes. Operations are rounded in the order
of `kernels.factored` and of the worker's replay kernel, fused multiply-adds included: the provisional update and the copies have torch's
bits, the exact step has the worker's. With ``TRITON_INTERPRET=1`` set before Triton's import, the kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import Factors, RoundingNoise

_BLOCK = 1024
"""Elements of one program, in the elementwise passes."""

_TILE_ROWS, _TILE_COLUMNS, _TILES = 16, 128, 8
"""Of `squared_norms`: a program reduces a strip of adjacent tiles and writes 4 bytes of partial sums per 16 and per 1,024 elements."""

_NO_DECAY, _DECAY_OF_WEIGHT, _DECAY_OF_GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sums_of_squares(
    gradient, row_parts, column_parts, n_rows, n_columns, n_strips,
    per_axis: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, n_tiles: tl.constexpr,
):  # fmt: skip
    """Sums over one strip: row_parts[row, strip] and column_parts[block of rows, column]. No two programs write the same element."""
    block, strip = tl.program_id(0), tl.program_id(1)
    rows = block.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    row_sums = tl.zeros((tile_rows,), dtype=tl.float32)
    for tile in range(n_tiles):
        columns = (strip * n_tiles + tile) * tile_columns + tl.arange(0, tile_columns)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
        values = tl.load(gradient + rows[:, None] * n_columns + columns[None, :], mask=inside, other=0.0)
        values = values.to(tl.float32)
        squares = values * values
        row_sums += tl.sum(squares, axis=1)
        if per_axis:
            target = column_parts + block.to(tl.int64) * n_columns + columns
            tl.store(target, tl.sum(squares, axis=0), mask=columns < n_columns)
    tl.store(row_parts + rows * n_strips + strip, row_sums, mask=rows < n_rows)


@triton.jit
def _provisional(
    weights, gradient, row_scale, size, col_scale, noise, finite, n, n_columns,
    noise_mask: tl.constexpr, stochastic: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < n
    row = i // n_columns
    scale = tl.load(row_scale + row, mask=inside) * size
    update = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) * scale
    update = update * tl.load(col_scale + (i - row * n_columns), mask=inside)
    old = tl.load(weights + i, mask=inside)
    values = old.to(tl.float32) - update
    if stochastic:
        bits = values.to(tl.int32, bitcast=True) + tl.load(noise + (i & noise_mask), mask=inside)
        values = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(weights + i, tl.where(tl.load(finite), values.to(weights.dtype.element_ty), old), mask=inside)


@triton.jit
def _adamw(
    master, exp_avg, exp_avg_sq, gradient, weights, n,
    factor, finite, step_size, bias_correction2,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_factor,
    decay: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside, applies = i < n, tl.load(finite)
    inv_sqrt_bias_correction2 = (1.0 / tl.sqrt(tl.load(bias_correction2))).to(tl.float32)
    old_w = tl.load(master + i, mask=inside, other=0.0)
    old_m = tl.load(exp_avg + i, mask=inside, other=0.0)
    old_v = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    if decay == _DECAY_OF_GRADIENT:
        g = tl.fma(old_w, decay_factor, g)
    m = tl.fma(g, one_minus_beta1, old_m * beta1)
    v = tl.fma(g * g, one_minus_beta2, old_v * beta2)
    u = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), inv_sqrt_bias_correction2, eps))
    w = old_w
    if decay == _DECAY_OF_WEIGHT:
        w = tl.fma(w, decay_factor, w)
    w = tl.where(applies, tl.fma(u, tl.load(step_size).to(tl.float32), w), old_w)
    tl.store(master + i, w, mask=inside)
    tl.store(exp_avg + i, tl.where(applies, m, old_m), mask=inside)
    tl.store(exp_avg_sq + i, tl.where(applies, v, old_v), mask=inside)
    tl.store(weights + i, w.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _copy_columns(
    matrix, columns, selected, n, width, n_selected,
    gather: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < n
    row = i // n_selected
    in_matrix = matrix + row * width + tl.load(columns + (i - row * n_selected), mask=inside, other=0)
    if gather:
        tl.store(selected + i, tl.load(in_matrix, mask=inside), mask=inside)
    else:
        tl.store(in_matrix, tl.load(selected + i, mask=inside), mask=inside)


class TritonKernels(Kernels):
    """One kernel a pass; only `squared_norms` allocates memory, for partial sums."""

    @override
    def squared_norms(self, gradient: Tensor, *, per_axis: bool) -> SquaredNorms:
        n_rows, n_columns = gradient.shape
        n_blocks, n_strips = triton.cdiv(n_rows, _TILE_ROWS), triton.cdiv(n_columns, _TILE_COLUMNS * _TILES)
        row_parts = torch.empty(n_rows, n_strips, dtype=torch.float32, device=gradient.device)
        column_parts = torch.empty(n_blocks if per_axis else 0, n_columns, dtype=torch.float32, device=gradient.device)
        _sums_of_squares[(n_blocks, n_strips)](
            gradient, row_parts, column_parts, n_rows, n_columns, n_strips,
            per_axis=per_axis, tile_rows=_TILE_ROWS, tile_columns=_TILE_COLUMNS, n_tiles=_TILES,
        )  # fmt: skip
        rows = row_parts.sum(1)
        return SquaredNorms(
            total=rows.double().sum(),
            rows=rows if per_axis else None,
            columns=column_parts.sum(0) if per_axis else None,
        )

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        stochastic = weights.dtype == torch.bfloat16
        # Drawn for stochastic rounding only, as TorchKernels does: the sequence of draws is part of the run's reproducible state.
        bits = noise.draw_tile() if stochastic else weights
        _provisional[(triton.cdiv(weights.numel(), _BLOCK),)](
            weights, gradient, factors.row_scale.contiguous(), size, factors.col_scale.contiguous(), bits, factors.finite,
            weights.numel(), weights.shape[1],
            noise_mask=bits.numel() - 1 if stochastic else 0, stochastic=stochastic, block=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        steps = scale.count.clamp(min=1)
        if h.weight_decay == 0:
            decay, decay_factor = _NO_DECAY, 0.0
        elif h.decoupled:
            decay, decay_factor = _DECAY_OF_WEIGHT, -h.lr * h.weight_decay
        else:
            decay, decay_factor = _DECAY_OF_GRADIENT, h.weight_decay
        _adamw[(triton.cdiv(gradient.numel(), _BLOCK),)](
            *state, gradient, weights, gradient.numel(),
            scale.factor, scale.finite, -h.lr / (1 - h.beta1**steps), 1 - h.beta2**steps,
            h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, decay_factor,
            decay=decay, block=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def gather_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self._copy_columns(matrix, columns, selected, gather=True)

    @override
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self._copy_columns(matrix, columns, selected, gather=False)

    def _copy_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor, *, gather: bool) -> None:
        _copy_columns[(triton.cdiv(selected.numel(), _BLOCK),)](
            matrix, columns, selected, selected.numel(), matrix.shape[1], columns.numel(), gather=gather, block=_BLOCK
        )
