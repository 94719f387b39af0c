"""The passes on a CUDA device, each fused into one Triton kernel of `kernels.triton_device`.

A launch costs about as much as a pass over a small matrix, so each pass is one launch, and leaves its partial sums to the next one. Each
reads and writes memory once; torch needs three to thirty passes. With ``TRITON_INTERPRET=1`` set before Triton's import, the kernels run on
a CPU.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import triton
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels import triton_device as device
from lightning_zenflow.kernels.base import IN_ORDER, ColumnWrite, Destination, Kernels, Selection, SquaredNorms
from lightning_zenflow.kernels.factored import SMALLEST, Factors, RoundingNoise, SecondMoment

_BLOCK = 1024
"""Elements of one program of `adamw`."""

_ROWS, _COLUMNS = 8, 256
"""Rectangle of the sums of squares. A row of it is read by one warp, which adds it up without shared memory."""

_ELEMENTS, _LARGE_MATRIX = 1 << 14, 1 << 24
"""Elements of one program of the sums, in matrices up to the second number; in larger ones it has more rows. So there are about 2^10 of
them at most, and `factored_step` has little to read."""

_UPDATE_ROWS, _UPDATE_COLUMNS = 8, 256
"""Rectangle of one program of `provisional_update`."""

_COPY_ROWS, _COPY_COLUMNS = 16, 128
"""Rectangle of one program that copies columns, counted in selected columns."""

_CHUNK, _PARTS_AT_ONCE, _FACTOR_WARPS = 2048, 16, 16
"""Of `factored_step`, a single program: loads in flight hide their latency."""

_FIELDS = 7
"""Of a write in the table of `write_columns`."""


class TritonKernels(Kernels):
    """One kernel a pass. Passes allocate their results and partial sums, nothing else."""

    @override
    def route(
        self,
        gradient: Tensor,
        destinations: Sequence[Destination],
        *,
        per_axis: bool,
        copies: AbstractContextManager[None] = IN_ORDER,
    ) -> SquaredNorms:
        """One launch besides the copies, for a single selection of columns; one more for each further selection."""
        fused: tuple[Tensor, Selection] | None = None
        with copies:
            for destination in destinations:
                destination.slot.copy_(destination.part_of(gradient), non_blocking=True)
        for destination in destinations:
            part = destination.part_of(gradient)
            for selection in destination.selections:
                if fused is None and selection.columns is not None and selection.target.numel():
                    fused = part, selection
                else:
                    self.select(part, selection)
        n_rows, n_columns = gradient.shape
        n_tiles = _ELEMENTS // (_ROWS * _COLUMNS) * triton.cdiv(gradient.numel(), _LARGE_MATRIX)
        n_groups, n_strips = triton.cdiv(n_rows, _ROWS * n_tiles), triton.cdiv(n_columns, _COLUMNS)
        parts = torch.empty(n_groups * n_strips, dtype=torch.float32, device=gradient.device)
        row_parts = column_parts = parts
        if per_axis:
            row_parts = torch.empty(n_strips, n_rows, dtype=torch.float32, device=gradient.device)
            column_parts = torch.empty(n_groups, n_columns, dtype=torch.float32, device=gradient.device)
        part, columns, selected, n_copies = gradient, gradient, gradient, 0
        if fused is not None:
            part, selection = fused
            assert selection.columns is not None
            columns, selected = selection.columns, selection.target
            n_copies = _copy_programs(*selected.shape)
        device.route[(parts.numel() + n_copies,)](
            gradient, parts, row_parts, column_parts, n_rows, n_columns, n_strips, n_tiles, parts.numel(),
            part, columns, selected, *part.shape, selected.shape[1],
            per_axis=per_axis, gathers=fused is not None, tile_rows=_ROWS, tile_columns=_COLUMNS,
            copy_rows=_COPY_ROWS, copy_columns=_COPY_COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip
        return SquaredNorms(
            parts=parts, row_parts=row_parts if per_axis else None, column_parts=column_parts if per_axis else None
        )

    @override
    def select(self, part: Tensor, selection: Selection) -> None:
        columns, target = selection.columns, selection.target
        if columns is None:
            super().select(part, selection)
            return
        device.gather_columns[(_copy_programs(*target.shape),)](
            part, columns, target, *part.shape, columns.numel(),
            tile_rows=_COPY_ROWS, tile_columns=_COPY_COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip

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
        # Drawn for stochastic rounding only, as torch's passes do: the sequence of draws is part of the run's reproducible state.
        bits = noise.draw_tile() if stochastic else weights
        n_strips = triton.cdiv(n_columns, _UPDATE_COLUMNS)
        device.provisional_update[(triton.cdiv(n_rows, _UPDATE_ROWS) * n_strips,)](
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
            decay, decay_factor = device.NO_DECAY, 0.0
        elif h.decoupled:
            decay, decay_factor = device.DECAY_OF_WEIGHT, -h.lr * h.weight_decay
        else:
            decay, decay_factor = device.DECAY_OF_GRADIENT, h.weight_decay
        step_size, inv_sqrt_bias_correction2 = scale.coefficients(h)
        device.adamw[(triton.cdiv(gradient.numel(), _BLOCK),)](
            *state, gradient, weights, gradient.numel(),
            scale.factor, scale.finite, step_size, inv_sqrt_bias_correction2,
            h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, decay_factor,
            decay=decay.value, block=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip

    @override
    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        writes = [write for write in writes if write.selected.numel()]
        if not writes:
            return lambda: None
        tables = [_beside(writes[0].matrix, table) for table in _tables(writes)]

        def write() -> None:
            # The tables hold addresses in the tensors of `writes`.
            device.write_columns[(len(tables[1]),)](
                *tables, writes[0].matrix,
                fields=_FIELDS, tile_rows=_COPY_ROWS, tile_columns=_COPY_COLUMNS, enable_fp_fusion=False,
            )  # fmt: skip

        return write


def _tables(writes: Sequence[ColumnWrite]) -> tuple[Tensor, Tensor]:
    """For `write_columns`: of each write the addresses and sizes; of each program its write, and its number in that write."""
    rows = []
    for write in writes:
        columns, n_indices = (0, 0) if write.columns is None else (write.columns.data_ptr(), write.columns.numel())
        sizes = n_indices, *write.matrix.shape, write.selected.shape[1]
        rows.append((write.matrix.data_ptr(), columns, write.selected.data_ptr(), *sizes))
    of_writes = [_copy_programs(*write.selected.shape) for write in writes]
    n_programs = torch.tensor(of_writes, dtype=torch.int64, device="cpu")
    of_write = torch.repeat_interleave(n_programs)
    first = n_programs.cumsum(0) - n_programs
    numbers = torch.arange(len(of_write), dtype=torch.int64, device="cpu")
    programs = torch.stack([of_write, numbers - first[of_write]], dim=1)
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), programs


def _beside(tensor: Tensor, table: Tensor) -> Tensor:
    """Copy of a table to a tensor's device, in stream order, without waiting for the device."""
    runtime = runtime_of(tensor.device)
    return runtime.to_device(runtime.empty_on_host(table.shape, table.dtype).copy_(table))


def _copy_programs(n_rows: int, n_selected: int) -> int:
    return int(triton.cdiv(n_rows, _COPY_ROWS) * triton.cdiv(n_selected, _COPY_COLUMNS))
