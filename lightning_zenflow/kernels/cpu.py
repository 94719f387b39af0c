"""The passes of `kernels.base` on a CPU, by the compiled library of ``csrc/cpu_device/device_kernels.h``."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow import native
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import IN_ORDER, ColumnWrite, Copies, Destination, Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import NOISE_NUMEL, Factors, RoundingNoise
from lightning_zenflow.native import cannot_run, fields, worker_executable

_SMALLEST_PART = 1 << 18
"""Elements; fewer do not pay for a thread."""

_pointer, _int64, _uint32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float


class _ProvisionalUpdateArgs(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "weights gradient"),
        (_int64, "rows columns"),
        (_pointer, "row_scale col_scale noise"),
        (_int64, "noise_mask"),
        (_float, "size"),
        (_uint32, "dtype"),
    )


class _Columns(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "matrix"),
        (_int64, "rows width"),
        (_pointer, "indices"),
        (_int64, "n_selected"),
        (_pointer, "selected"),
    )


@cache
def _library() -> ctypes.CDLL:
    path = worker_executable().with_name("libzenflow-device.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(cannot_run(path, error)) from error
    library.zenflow_route.argtypes = [_pointer, _int64, _int64, _pointer, _pointer, _uint32, _int64]
    library.zenflow_provisional_update.argtypes = [ctypes.POINTER(_ProvisionalUpdateArgs), _int64]
    state, hyperparameters = (_pointer, _pointer, _pointer), ctypes.POINTER(native.Hyperparameters)
    library.zenflow_adamw.argtypes = [
        *(*state, _pointer, _pointer, _int64),
        *(hyperparameters, _int64, _float, _uint32, _int64),
    ]
    library.zenflow_scatter_columns.argtypes = [ctypes.POINTER(_Columns), _int64, _uint32]
    return library


class CpuKernels(Kernels):
    """Compiled loops for what reads or writes whole matrices, with rows divided among as many threads as torch uses.

    Results have the same bits for every number of threads. `adamw_` has the bits of the worker's kernel.
    """

    def __init__(self) -> None:
        self._library = _library()

    @override
    def route(
        self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool, copies: Copies = IN_ORDER
    ) -> SquaredNorms:
        """One pass over memory for what every step needs: not within single rows, and without `per_axis` and selections."""
        (n_rows, n_columns), dtype = gradient.shape, gradient.dtype
        squared_norms = gradient.new_empty(1, n_rows, dtype=torch.float32)
        parts: list[tuple[int, int, int | None]] = [(0, n_rows, None)]
        if any(destination.slot.shape[1] != n_columns for destination in destinations):
            self.copy_parts(gradient, destinations, copies)
            destinations, copies = (), IN_ORDER
        elif destinations:
            parts = [(d.begin // n_columns, len(d.slot), _address(d.slot, dtype)) for d in destinations]
        begin, norms, code = _address(gradient, dtype), squared_norms.data_ptr(), native.DATA_TYPES[dtype]
        with copies:
            for row, n, slot in parts:
                first, n_threads = begin + row * n_columns * dtype.itemsize, _n_threads(n, n * n_columns)
                self._library.zenflow_route(first, n, n_columns, norms + 4 * row, slot, code, n_threads)
        self.select_parts(gradient, destinations)
        total = squared_norms.sum(1, dtype=torch.float64)
        if not per_axis:
            return SquaredNorms(parts=total)
        columns = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=torch.float32)
        return SquaredNorms(parts=total, per_axis=(squared_norms, columns.square_()))

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        n_rows, n_columns = weights.shape
        bits = _address(noise.draw_tile(), torch.int32, NOISE_NUMEL)
        if not factors.finite:
            return
        row_scale, col_scale = factors.row_scale.contiguous(), factors.col_scale.contiguous()
        dtype = weights.dtype
        args = _ProvisionalUpdateArgs(
            *(_address(weights, dtype), _address(gradient, dtype, weights.numel()), n_rows, n_columns),
            *(_address(row_scale, torch.float32, n_rows), _address(col_scale, torch.float32, n_columns)),
            *(bits, NOISE_NUMEL - 1, size, native.DATA_TYPES[dtype]),
        )
        self._library.zenflow_provisional_update(args, _n_threads(n_rows, weights.numel()))

    @override
    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        if not scale.finite:
            weights.copy_(state[0])
            return
        n, dtype = gradient.numel(), weights.dtype
        self._library.zenflow_adamw(
            *(_address(values, torch.float32, n) for values in state),
            *(_address(gradient, dtype), _address(weights, dtype, n), n),
            *(ctypes.pointer(native.Hyperparameters(**vars(h))), int(scale.count), float(scale.factor)),
            *(native.DATA_TYPES[dtype], _n_threads(n, n)),
        )

    @override
    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        writes = list(writes)
        table = (_Columns * len(writes))()
        for entry, (matrix, s) in zip(table, writes, strict=True):
            dtype, (n_rows, n_selected) = writes[0][0].dtype, s.entries.shape
            entry.matrix, entry.rows, entry.width = _address(matrix, dtype), *matrix.shape
            entry.indices = None if s.columns is None else _address(s.columns, torch.int64, n_selected)
            entry.n_selected, entry.selected = n_selected, _address(s.entries, dtype)
            assert n_rows == entry.rows and n_selected <= entry.width, (matrix.shape, s)

        def write() -> None:
            # The table points into the tensors of `writes`.
            if writes:
                dtype = native.DATA_TYPES[writes[0][0].dtype]
                self._library.zenflow_scatter_columns(table, len(table), dtype)

        return write


def _address(tensor: Tensor, dtype: torch.dtype, numel: int | None = None) -> int:
    """Address of what the library reads or writes, which must be contiguous, on the CPU, of this type and, if given, this length.

    Tensors of callers pass here on their way to C++, which sees none of this.
    """
    as_promised = tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()
    assert as_promised and numel in (None, tensor.numel()), (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return tensor.data_ptr()


def _n_threads(n_rows: int, numel: int) -> int:
    return max(1, min(torch.get_num_threads(), n_rows, numel // _SMALLEST_PART))
