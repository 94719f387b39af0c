"""The Triton kernels that `kernels.triton` launches.

Operations are rounded in the order of `kernels.base` and of the worker's replay kernel, fused multiply-adds included: the provisional
update and the copies have torch's bits, the exact step has the worker's.

Matrices are cut into rectangles, so that no element's position is divided by the length of a row; where that is a multiple of 16, memory is
accessed in words of 16 bytes. Kernels are not specialised in other sizes, so that each has few compiled variants.
"""

import triton
import triton.language as tl

from lightning_zenflow.kernels.base import DONE_NUMEL

BLOCK = tl.constexpr(DONE_NUMEL)
"""Elements of one program of `adamw`."""

ROWS, COLUMNS = tl.constexpr(8), tl.constexpr(256)
"""Rectangle of the sums of squares and of `provisional_update`. One warp reads a row of it and adds it up without shared memory."""

COPY_ROWS, COPY_COLUMNS = tl.constexpr(16), tl.constexpr(128)
"""Rectangle of one program of `write_columns`, counted in selected columns."""

CHUNK, PARTS_AT_ONCE = tl.constexpr(2048), tl.constexpr(16)
"""Of `factored_step`, a single program of 16 warps: loads in flight hide their latency."""

FIELDS = tl.constexpr(7)
"""Of a write in the table of `write_columns`."""

NO_DECAY, DECAY_OF_WEIGHT, DECAY_OF_GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Of `adamw`: whether the decay acts on the weight or is added to the gradient."""


@triton.jit(do_not_specialize=["n_rows", "n_strips", "n_tiles"])
def sum_squares(
    gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles, per_axis: tl.constexpr
):  # fmt: skip
    """Sums over one strip of adjacent rectangles, one below the other. No two programs write the same element."""
    program = tl.program_id(0)
    group, strip = program // n_strips, program % n_strips
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, ROWS)
    offsets = in_tile[:, None] * n_columns + columns[None, :]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    first = group * n_tiles * ROWS
    end = tl.minimum(first + n_tiles * ROWS, n_rows)
    while first < end:
        is_row = in_tile < n_rows - first
        inside = is_row[:, None] & (columns < n_columns)[None, :]
        source = gradient + first.to(tl.int64) * n_columns
        values = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
        squares = values * values
        sums += squares
        if per_axis:
            target = row_parts + strip.to(tl.int64) * n_rows + first
            tl.store(target + in_tile, tl.sum(squares, axis=1), mask=is_row)
        first += ROWS
    of_columns = tl.sum(sums, axis=0)
    if per_axis:
        tl.store(column_parts + group.to(tl.int64) * n_columns + columns, of_columns, mask=columns < n_columns)
    tl.store(parts + program, tl.sum(of_columns, axis=0))


@triton.jit
def _add_to_mean(mean, parts, i, n, n_parts, factor, weight, applies):
    """Moves the mean by weight * (factor * (sum of the parts) - mean) at the elements i of n; returns it."""
    inside = i < n
    sums = tl.zeros((CHUNK,), dtype=tl.float32)
    first = 0
    while first < n_parts:
        part = first + tl.arange(0, PARTS_AT_ONCE)
        some = (part < n_parts)[:, None] & inside[None, :]
        sums += tl.sum(tl.load(parts + part.to(tl.int64)[:, None] * n + i[None, :], mask=some, other=0.0), axis=0)
        first += PARTS_AT_ONCE
    old = tl.load(mean + i, mask=inside, other=0.0)
    new = tl.where(applies, old + weight * (sums * factor - old), old)
    # Several threads may have read an element that one of them writes.
    tl.debug_barrier()
    tl.store(mean + i, new, mask=inside)
    return new


@triton.jit(do_not_specialize=["n_parts", "n_row_parts", "n_column_parts"])
def factored_step(
    parts, row_parts, column_parts, row, col, steps, row_scale, col_scale, finite, scale,
    n_parts, n_row_parts, n_column_parts, n_rows, n_columns, weight, log_beta2, lr, smallest,
):  # fmt: skip
    """`Kernels.factored_step_` by a single program."""
    sums = tl.zeros((CHUNK,), dtype=tl.float32)
    first = 0
    while first < n_parts:
        i = first + tl.arange(0, CHUNK)
        sums += tl.load(parts + i, mask=i < n_parts, other=0.0)
        first += CHUNK
    factor = tl.load(scale)
    applies = tl.sum(sums, axis=0) * factor < float("inf")
    tl.store(finite, applies)
    n = tl.load(steps) + applies.to(tl.float32)
    tl.debug_barrier()
    tl.store(steps, n)
    # In float64, because the power is close to one.
    power = tl.exp((tl.maximum(n, 1.0) * log_beta2).to(tl.float64))
    bias_correction = (1.0 - power).to(tl.float32)
    squared = factor * factor
    sums = tl.zeros((CHUNK,), dtype=tl.float32)
    first = 0
    while first < n_columns:
        i = first + tl.arange(0, CHUNK)
        new = _add_to_mean(col, column_parts, i, n_columns, n_column_parts, squared / n_rows, weight, applies)
        sums += new
        tl.store(col_scale + i, tl.rsqrt(tl.maximum(new, smallest)), mask=i < n_columns)
        first += CHUNK
    size = tl.sqrt(tl.sum(sums, axis=0) / n_columns * bias_correction) * (factor * lr)
    first = 0
    while first < n_rows:
        i = first + tl.arange(0, CHUNK)
        new = _add_to_mean(row, row_parts, i, n_rows, n_row_parts, squared / n_columns, weight, applies)
        tl.store(row_scale + i, tl.rsqrt(tl.maximum(new, smallest)) * size, mask=i < n_rows)
        first += CHUNK


@triton.jit(do_not_specialize=["n_rows", "n_strips"])
def provisional_update(
    weights, gradient, row_scale, size, col_scale, noise, finite, n_rows, n_columns, n_strips,
    noise_mask: tl.constexpr, stochastic: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """One rectangle of `Kernels.provisional_update_`."""
    program = tl.program_id(0)
    first = (program // n_strips) * ROWS
    in_tile, columns = tl.arange(0, ROWS), (program % n_strips) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = in_tile < n_rows - first, columns < n_columns
    inside = is_row[:, None] & is_column[None, :]
    offsets = in_tile[:, None] * n_columns + columns[None, :]
    begin = first.to(tl.int64) * n_columns
    scale = tl.load(row_scale + first + in_tile, mask=is_row) * size
    update = tl.load(gradient + begin + offsets, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    update = update * tl.load(col_scale + columns, mask=is_column)[None, :]
    old = tl.load(weights + begin + offsets, mask=inside)
    values = old.to(tl.float32) - update
    if stochastic:
        i = ((begin & noise_mask).to(tl.int32) + offsets) & noise_mask
        if aligned:
            i = tl.max_contiguous(tl.multiple_of(i, (1, 4)), (1, 4))
        bits = values.to(tl.int32, bitcast=True) + tl.load(noise + i, mask=inside)
        values = (bits & -65536).to(tl.float32, bitcast=True)
    new = tl.where(tl.load(finite), values.to(weights.dtype.element_ty), old)
    tl.store(weights + begin + offsets, new, mask=inside)


@triton.jit(do_not_specialize=["step"])
def adamw(
    master, exp_avg, exp_avg_sq, gradient, weights, n,
    factor, finite, step_size, inv_sqrt_bias_correction2,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_factor, done, step,
    decay: tl.constexpr,
):  # fmt: skip
    """`Kernels.adamw_`, for adjacent elements; `done` has an int32 for each program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(tl.load(done + tl.program_id(0)) == step, 0, n)
    inside, applies = i < end, tl.load(finite)
    old_w = tl.load(master + i, mask=inside, other=0.0)
    old_m = tl.load(exp_avg + i, mask=inside, other=0.0)
    old_v = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    if decay == DECAY_OF_GRADIENT:
        g = tl.fma(old_w, decay_factor, g)
    m = tl.fma(g, one_minus_beta1, old_m * beta1)
    v = tl.fma(g * g, one_minus_beta2, old_v * beta2)
    u = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), tl.load(inv_sqrt_bias_correction2).to(tl.float32), eps))
    w = old_w
    if decay == DECAY_OF_WEIGHT:
        w = tl.fma(w, decay_factor, w)
    w = tl.where(applies, tl.fma(u, -tl.load(step_size).to(tl.float32), w), old_w)
    tl.store(master + i, w, mask=inside)
    tl.store(exp_avg + i, tl.where(applies, m, old_m), mask=inside)
    tl.store(exp_avg_sq + i, tl.where(applies, v, old_v), mask=inside)
    tl.store(weights + i, w.to(weights.dtype.element_ty), mask=inside)
    # Several threads may have read what one of them writes.
    tl.debug_barrier()
    tl.store(done + tl.program_id(0), step)


@triton.jit
def write_columns(writes, programs, model):
    """Many writes at once, see `kernels.triton`, by programs of one rectangle each; without indices, of all columns. `model`
    is a tensor of their type, whose elements are not accessed.
    """
    write = writes + tl.load(programs + 2 * tl.program_id(0)) * FIELDS
    program = tl.load(programs + 2 * tl.program_id(0) + 1).to(tl.int32)
    matrix = tl.load(write).to(tl.pointer_type(model.dtype.element_ty))
    columns = tl.load(write + 1).to(tl.pointer_type(tl.int64))
    selected = tl.load(write + 2).to(tl.pointer_type(model.dtype.element_ty))
    n_indices, n_rows, width = tl.load(write + 3).to(tl.int32), tl.load(write + 4).to(tl.int32), tl.load(write + 5)
    n_selected = tl.load(write + 6).to(tl.int32)
    n_strips = tl.cdiv(n_selected, COPY_COLUMNS)
    rows = (program // n_strips) * COPY_ROWS + tl.arange(0, COPY_ROWS)
    i = (program % n_strips) * COPY_COLUMNS + tl.arange(0, COPY_COLUMNS)
    column = tl.where(i < n_indices, tl.load(columns + i, mask=i < n_indices, other=0), i)
    inside = (rows < n_rows)[:, None] & (i < n_selected)[None, :]
    values = tl.load(selected + (rows.to(tl.int64) * n_selected)[:, None] + i[None, :], mask=inside)
    tl.store(matrix + (rows.to(tl.int64) * width)[:, None] + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["n_singles", "n_doubles", "block", "step", "max_norm", "loss_scale", "inverse_scale"])
def block_word(
    singles, n_singles, doubles, n_doubles, total, partial, ratio, expected, word,
    block, step, max_norm, loss_scale, inverse_scale,
    clips: tl.constexpr, speculates: tl.constexpr, learns: tl.constexpr,
):  # fmt: skip
    """`GradientNorms.word` by a single program; comparisons with NaN are false. With `learns` limit and loss scale are on the device."""
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < tl.maximum(n_singles, n_doubles):
        i = first + tl.arange(0, BLOCK)
        sums += tl.load(singles + i, mask=i < n_singles, other=0.0).to(tl.float64)
        sums += tl.load(doubles + i, mask=i < n_doubles, other=0.0)
        first += BLOCK
    squared_norm = tl.load(total) + tl.sum(sums, axis=0)
    # Several threads may have read what one of them writes.
    tl.debug_barrier()
    tl.store(total, squared_norm)
    tl.store(partial + block, squared_norm)
    if speculates:
        squared_norm -= squared_norm
    elif clips:
        known, last = tl.load(ratio + block), tl.load(expected)
        squared_norm = tl.where(known == known, squared_norm * known, tl.where(last > squared_norm, last, squared_norm))
    factor = inverse_scale
    if clips:
        limit, scale = max_norm, loss_scale
        if learns:
            limit, scale = tl.load(max_norm), tl.load(loss_scale)
        divisor = tl.div_rn((tl.sqrt(squared_norm) / scale).to(tl.float32) + 1e-6, limit)
        factor = tl.div_rn(1.0, tl.where(divisor < 1.0, 1.0, divisor) * scale)
    single = squared_norm.to(tl.float32)
    factor += single - single
    bits, number = factor.to(tl.int32, bitcast=True).to(tl.int64), step.to(tl.int64)
    tl.store(word, (bits & 0xFFFFFFFF) | ((bits ^ number) << 32))
    tl.store(word + 1, number)
