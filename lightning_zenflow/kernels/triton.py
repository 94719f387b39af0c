"""The passes on a CUDA device, each fused into one Triton kernel.

A launch costs about as much as a pass over a small matrix, so each pass is one launch and leaves partial sums to the next one. Each reads
and writes memory once; torch needs three to thirty passes. Operations are rounded in the order of `kernels.factored` and of the worker's
replay kernel, fused multiply-adds included: the provisional update and the copies have torch's bits, the exact step has the worker's. With
``TRITON_INTERPRET=1`` set before Triton's import, the kernels run on a CPU.

Matrices are cut into rectangles, so that no element's position is divided by the length of a row; where that is a multiple of 16, memory is
accessed in words of 16 bytes. Launches do not differ in the other sizes: each kernel has few compiled variants.
"""

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Destination, Kernels, Selection, SquaredNorms
from lightning_zenflow.kernels.factored import SMALLEST, Factors, RoundingNoise, SecondMoment

_BLOCK = 1024
"""Elements of one program of `_adamw`."""

_ROWS, _COLUMNS = 16, 256
"""Rectangle of the sums of squares. A row of it is read by one warp, which adds it up without shared memory."""

_ELEMENTS = 1 << 14
"""Of one program of the sums, in matrices up to 2^24 elements; in larger ones it has more rows. So there are at most about 2^10 of them,
and what `_factored_step` must read is small."""

_UPDATE_ROWS, _UPDATE_COLUMNS = 8, 256
"""Rectangle of one program of `_provisional`."""

_COPY_ROWS, _COPY_COLUMNS = 16, 128
"""Rectangle of one program that copies columns, counted in selected columns."""

_CHUNK, _PARTS_AT_ONCE, _FACTOR_WARPS = 2048, 16, 16
"""Of `_factored_step`, a single program: loads in flight hide their latency."""

_NO_DECAY, _DECAY_OF_WEIGHT, _DECAY_OF_GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sum_squares(
    program, gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles,
    per_axis: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Sums over one strip of adjacent rectangles, one below the other. No two programs write the same element."""
    group, strip = program // n_strips, program % n_strips
    columns = strip * tile_columns + tl.arange(0, tile_columns)
    in_tile = tl.arange(0, tile_rows)
    offsets = in_tile[:, None] * n_columns + columns[None, :]
    sums = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    for tile in range(n_tiles):
        first = (group * n_tiles + tile).to(tl.int64) * tile_rows
        rows = first + in_tile
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        values = tl.load(gradient + first * n_columns + offsets, mask=inside, other=0.0).to(tl.float32)
        squares = values * values
        sums += squares
        if per_axis:
            target = row_parts + strip.to(tl.int64) * n_rows + rows
            tl.store(target, tl.sum(squares, axis=1), mask=rows < n_rows)
    of_columns = tl.sum(sums, axis=0)
    if per_axis:
        tl.store(column_parts + group.to(tl.int64) * n_columns + columns, of_columns, mask=columns < n_columns)
    tl.store(parts + program, tl.sum(of_columns, axis=0))


@triton.jit
def _copy_rectangle(
    program, matrix, columns, has_columns, selected, n_rows, width, n_selected,
    gather: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    n_strips = tl.cdiv(n_selected, tile_columns)
    rows = ((program // n_strips) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    i = (program % n_strips) * tile_columns + tl.arange(0, tile_columns)
    is_column = i < n_selected
    column = i.to(tl.int64)
    if has_columns:
        column = tl.load(columns + i, mask=is_column, other=0)
    inside = (rows < n_rows)[:, None] & is_column[None, :]
    in_matrix = matrix + (rows * width)[:, None] + column[None, :]
    in_selected = selected + (rows * n_selected)[:, None] + i[None, :]
    if gather:
        tl.store(in_selected, tl.load(in_matrix, mask=inside), mask=inside)
    else:
        tl.store(in_matrix, tl.load(in_selected, mask=inside), mask=inside)


@triton.jit(do_not_specialize=[
    "n_rows", "n_strips", "n_tiles", "n_sums", "part_rows", "part_width", "n_selected"
])  # fmt: skip
def _route(
    gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles, n_sums,
    part, columns, selected, part_rows, part_width, n_selected,
    per_axis: tl.constexpr, gathers: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    copy_rows: tl.constexpr, copy_columns: tl.constexpr,
):  # fmt: skip
    """Sums of squares of a gradient by the first `n_sums` programs, columns of a part of it by the others."""
    program = tl.program_id(0)
    if program < n_sums:
        _sum_squares(
            program, gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles,
            per_axis, tile_rows, tile_columns,
        )  # fmt: skip
    elif gathers:
        _copy_rectangle(
            program - n_sums, part, columns, True, selected, part_rows, part_width, n_selected,
            True, copy_rows, copy_columns,
        )  # fmt: skip


@triton.jit
def _add_to_mean(
    mean, parts, i, n, n_parts, factor, weight, applies, n_at_once: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
    """mean <- mean + weight * (factor * (sum of the parts) - mean) at the elements i of n; returns it."""
    inside = i < n
    sums = tl.zeros((chunk,), dtype=tl.float32)
    for first in range(0, n_parts, n_at_once):
        part = first + tl.arange(0, n_at_once)
        some = (part < n_parts)[:, None] & inside[None, :]
        sums += tl.sum(tl.load(parts + part.to(tl.int64)[:, None] * n + i[None, :], mask=some, other=0.0), axis=0)
    old = tl.load(mean + i, mask=inside, other=0.0)
    new = tl.where(applies, old + weight * (sums * factor - old), old)
    tl.store(mean + i, new, mask=inside)
    return new


@triton.jit(do_not_specialize=["n_parts", "n_row_parts", "n_column_parts"])
def _factored_step(
    parts, row_parts, column_parts, row, col, steps, row_scale, col_scale, finite, scale,
    n_parts, n_row_parts, n_column_parts, n_rows, n_columns, weight, log_beta2, lr, smallest,
    n_at_once: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """`kernels.factored.factored_step_` by a single program."""
    sums = tl.zeros((chunk,), dtype=tl.float32)
    for first in range(0, n_parts, chunk):
        i = first + tl.arange(0, chunk)
        sums += tl.load(parts + i, mask=i < n_parts, other=0.0)
    applies = tl.sum(sums, axis=0) < float("inf")
    tl.store(finite, applies)
    n = tl.load(steps) + applies.to(tl.float32)
    tl.store(steps, n)
    # In float64, because the power is close to one.
    power = tl.exp((tl.maximum(n, 1.0) * log_beta2).to(tl.float64))
    bias_correction = (1.0 - power).to(tl.float32)
    factor = tl.load(scale)
    squared = factor * factor
    sums = tl.zeros((chunk,), dtype=tl.float32)
    for first in range(0, n_columns, chunk):
        i = first + tl.arange(0, chunk)
        new = _add_to_mean(
            col, column_parts, i, n_columns, n_column_parts, squared / n_rows, weight, applies, n_at_once, chunk
        )
        sums += new
        tl.store(col_scale + i, tl.rsqrt(tl.maximum(new, smallest)), mask=i < n_columns)
    size = tl.sqrt(tl.sum(sums, axis=0) / n_columns * bias_correction) * (factor * lr)
    for first in range(0, n_rows, chunk):
        i = first + tl.arange(0, chunk)
        new = _add_to_mean(
            row, row_parts, i, n_rows, n_row_parts, squared / n_columns, weight, applies, n_at_once, chunk
        )
        tl.store(row_scale + i, tl.rsqrt(tl.maximum(new, smallest)) * size, mask=i < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_strips"])
def _provisional(
    weights, gradient, row_scale, size, col_scale, noise, finite, n_rows, n_columns, n_strips,
    noise_mask: tl.constexpr, stochastic: tl.constexpr, aligned: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = (program // n_strips).to(tl.int64) * tile_rows
    in_tile = tl.arange(0, tile_rows)
    rows, columns = first + in_tile, (program % n_strips) * tile_columns + tl.arange(0, tile_columns)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    offsets = in_tile[:, None] * n_columns + columns[None, :]
    scale = tl.load(row_scale + rows, mask=rows < n_rows) * size
    update = tl.load(gradient + first * n_columns + offsets, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    update = update * tl.load(col_scale + columns, mask=columns < n_columns)[None, :]
    old = tl.load(weights + first * n_columns + offsets, mask=inside)
    values = old.to(tl.float32) - update
    if stochastic:
        i = (((first * n_columns) & noise_mask).to(tl.int32) + offsets) & noise_mask
        if aligned:
            i = tl.max_contiguous(tl.multiple_of(i, (1, 4)), (1, 4))
        bits = values.to(tl.int32, bitcast=True) + tl.load(noise + i, mask=inside)
        values = (bits & -65536).to(tl.float32, bitcast=True)
    new = tl.where(tl.load(finite), values.to(weights.dtype.element_ty), old)
    tl.store(weights + first * n_columns + offsets, new, mask=inside)


@triton.jit
def _adamw(
    master, exp_avg, exp_avg_sq, gradient, weights, n,
    factor, finite, step_size, inv_sqrt_bias_correction2,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_factor,
    decay: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside, applies = i < n, tl.load(finite)
    old_w = tl.load(master + i, mask=inside, other=0.0)
    old_m = tl.load(exp_avg + i, mask=inside, other=0.0)
    old_v = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    if decay == _DECAY_OF_GRADIENT:
        g = tl.fma(old_w, decay_factor, g)
    m = tl.fma(g, one_minus_beta1, old_m * beta1)
    v = tl.fma(g * g, one_minus_beta2, old_v * beta2)
    u = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), tl.load(inv_sqrt_bias_correction2).to(tl.float32), eps))
    w = old_w
    if decay == _DECAY_OF_WEIGHT:
        w = tl.fma(w, decay_factor, w)
    w = tl.where(applies, tl.fma(u, -tl.load(step_size).to(tl.float32), w), old_w)
    tl.store(master + i, w, mask=inside)
    tl.store(exp_avg + i, tl.where(applies, m, old_m), mask=inside)
    tl.store(exp_avg_sq + i, tl.where(applies, v, old_v), mask=inside)
    tl.store(weights + i, w.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _copy_columns(
    matrix, columns, selected, n_rows, width, n_selected,
    gather: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    _copy_rectangle(
        tl.program_id(0), matrix, columns, True, selected, n_rows, width, n_selected, gather, tile_rows, tile_columns
    )


@triton.jit
def _write_columns(writes, programs, model, fields: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Many writes at once, see `_tables`; `model` is a tensor of their type, whose elements are not accessed."""
    write = writes + tl.load(programs + 2 * tl.program_id(0)) * fields
    program = tl.load(programs + 2 * tl.program_id(0) + 1).to(tl.int32)
    matrix = tl.load(write).to(tl.pointer_type(model.dtype.element_ty))
    columns = tl.load(write + 1)
    selected = tl.load(write + 2).to(tl.pointer_type(model.dtype.element_ty))
    n_rows, width, n_selected = tl.load(write + 3), tl.load(write + 4), tl.load(write + 5).to(tl.int32)
    _copy_rectangle(
        program, matrix, columns.to(tl.pointer_type(tl.int64)), columns != 0, selected, n_rows, width, n_selected,
        False, tile_rows, tile_columns,
    )  # fmt: skip


class TritonKernels(Kernels):
    """One kernel a pass. Passes allocate their results and partial sums, nothing else."""

    @override
    def route(self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool) -> SquaredNorms:
        """One launch besides the copies, for a single selection of columns; one more for each further selection."""
        fused: tuple[Tensor, Selection] | None = None
        for destination in destinations:
            part = destination.part_of(gradient)
            destination.slot.copy_(part, non_blocking=True)
            for selection in destination.selections:
                if fused is None and selection.columns is not None and selection.target.numel():
                    fused = part, selection
                else:
                    self.select(part, (selection,))
        return self._route(gradient, fused, per_axis=per_axis)

    @override
    def squared_norms(self, gradient: Tensor, *, per_axis: bool) -> SquaredNorms:
        return self._route(gradient, None, per_axis=per_axis)

    def _route(self, gradient: Tensor, fused: tuple[Tensor, Selection] | None, *, per_axis: bool) -> SquaredNorms:
        (n_rows, n_columns), device = gradient.shape, gradient.device
        n_tiles = _ELEMENTS // (_ROWS * _COLUMNS) * triton.cdiv(gradient.numel(), 1 << 24)
        n_groups, n_strips = triton.cdiv(n_rows, _ROWS * n_tiles), triton.cdiv(n_columns, _COLUMNS)
        parts = torch.empty(n_groups * n_strips, dtype=torch.float32, device=device)
        row_parts = column_parts = parts
        if per_axis:
            row_parts = torch.empty(n_strips, n_rows, dtype=torch.float32, device=device)
            column_parts = torch.empty(n_groups, n_columns, dtype=torch.float32, device=device)
        part, columns, selected, n_copies = gradient, gradient, gradient, 0
        if fused is not None:
            part, selection = fused
            assert selection.columns is not None
            columns, selected = selection.columns, selection.target
            n_copies = _copy_programs(*selected.shape)
        _route[(parts.numel() + n_copies,)](
            gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles, parts.numel(),
            part, columns, selected, *part.shape, selected.shape[1],
            per_axis=per_axis, gathers=fused is not None, tile_rows=_ROWS, tile_columns=_COLUMNS,
            copy_rows=_COPY_ROWS, copy_columns=_COPY_COLUMNS,
        )  # fmt: skip
        return SquaredNorms(
            parts=parts,
            row_parts=row_parts if per_axis else None,
            column_parts=column_parts if per_axis else None,
        )

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
        _factored_step[(1,)](
            squared_norms.parts, row_parts, column_parts, *moment.tensors(),
            factors.row_scale, factors.col_scale, factors.finite, scale,
            squared_norms.parts.numel(), n_row_parts, n_column_parts, n_rows, n_columns,
            1 - beta2, math.log(beta2) if beta2 > 0 else -math.inf, lr, SMALLEST,
            n_at_once=_PARTS_AT_ONCE, chunk=_CHUNK, num_warps=_FACTOR_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return factors

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        n_rows, n_columns = weights.shape
        stochastic = weights.dtype == torch.bfloat16
        # Drawn for stochastic rounding only, as TorchKernels does: the sequence of draws is part of the run's reproducible state.
        bits = noise.draw_tile() if stochastic else weights
        n_strips = triton.cdiv(n_columns, _UPDATE_COLUMNS)
        _provisional[(triton.cdiv(n_rows, _UPDATE_ROWS) * n_strips,)](
            weights, gradient, factors.row_scale.contiguous(), size, factors.col_scale.contiguous(), bits, factors.finite,
            n_rows, n_columns, n_strips,
            noise_mask=bits.numel() - 1 if stochastic else 0, stochastic=stochastic, aligned=n_columns % 16 == 0,
            tile_rows=_UPDATE_ROWS, tile_columns=_UPDATE_COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        if h.weight_decay == 0:
            decay, decay_factor = _NO_DECAY, 0.0
        elif h.decoupled:
            decay, decay_factor = _DECAY_OF_WEIGHT, -h.lr * h.weight_decay
        else:
            decay, decay_factor = _DECAY_OF_GRADIENT, h.weight_decay
        coefficients = scale.coefficients(h)
        _adamw[(triton.cdiv(gradient.numel(), _BLOCK),)](
            *state, gradient, weights, gradient.numel(),
            scale.factor, scale.finite, coefficients.step_size, coefficients.inv_sqrt_bias_correction2,
            h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, decay_factor,
            decay=decay, block=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        writes = [write for write in writes if write.selected.numel()]
        if not writes:
            return lambda: None
        tables = [_on_device(table, writes[0].matrix.device) for table in _tables(writes)]

        def write() -> None:
            # The tables hold addresses in the tensors of `writes`.
            _write_columns[(len(tables[1]),)](
                *tables, writes[0].matrix, fields=_FIELDS, tile_rows=_COPY_ROWS, tile_columns=_COPY_COLUMNS
            )

        return write

    @override
    def gather_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self._copy_columns(matrix, columns, selected, gather=True)

    @override
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self._copy_columns(matrix, columns, selected, gather=False)

    def _copy_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor, *, gather: bool) -> None:
        _copy_columns[(_copy_programs(*selected.shape),)](
            matrix, columns, selected, *matrix.shape, columns.numel(),
            gather=gather, tile_rows=_COPY_ROWS, tile_columns=_COPY_COLUMNS,
        )  # fmt: skip


_FIELDS = 6


def _tables(writes: Sequence[ColumnWrite]) -> tuple[Tensor, Tensor]:
    """For `_write_columns`: of each write the addresses and sizes; of each program its write, and its number in that write."""
    rows, programs = [], []
    for number, write in enumerate(writes):
        columns = 0 if write.columns is None else write.columns.data_ptr()
        sizes = *write.matrix.shape, write.selected.shape[1]
        rows.append((write.matrix.data_ptr(), columns, write.selected.data_ptr(), *sizes))
        of_write = torch.arange(_copy_programs(*write.selected.shape))
        programs.append(torch.stack([torch.full_like(of_write, number), of_write], dim=1))
    return torch.tensor(rows, dtype=torch.int64), torch.cat(programs)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy of a table, in stream order, without waiting for the device."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


def _copy_programs(n_rows: int, n_selected: int) -> int:
    return triton.cdiv(n_rows, _COPY_ROWS) * triton.cdiv(n_selected, _COPY_COLUMNS)
