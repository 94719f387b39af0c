"""The passes of `kernels.base` on a CPU, by the compiled library of ``csrc/cpu_device/device_kernels.h``."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow import native
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import IN_ORDER, ColumnWrite, Copies, Destination, Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import NOISE_NUMEL, Factors, RoundingNoise, SecondMoment
from lightning_zenflow.native import cannot_run, fields, worker_executable

_SMALLEST_PART = 1 << 18
"""Elements; fewer do not pay for a thread."""

_FLOAT_BYTES = 4

_pointer, _int64, _uint32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_float, _double = ctypes.c_float, ctypes.c_double


class _RouteArgs(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "gradient"),
        (_int64, "rows columns"),
        (_pointer, "row_squared_norms col_squared_norms slot indices"),
        (_int64, "n_selected"),
        (_pointer, "selected"),
        (_uint32, "dtype"),
    )


class _RoutePart(ctypes.Structure):
    _fields_ = (("runs", ctypes.POINTER(_RouteArgs)), ("n_runs", _int64))


class _FactoredStepArgs(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "row_squared_norms"),
        (_int64, "rows"),
        (_pointer, "col_squared_norms"),
        (_int64, "columns"),
        (_pointer, "row col steps row_scale col_scale"),
        (_double, "beta2 lr"),
        (_float, "scale"),
    )


class _ProvisionalUpdateArgs(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "weights gradient"),
        (_int64, "rows columns"),
        (_pointer, "row_scale col_scale noise"),
        (_int64, "noise_mask first"),
        (_float, "size"),
        (_uint32, "dtype"),
    )


class _AdamwArgs(ctypes.Structure):
    _fields_ = fields(
        (_pointer, "master exp_avg exp_avg_sq gradient weights"),
        (_int64, "n"),
        (ctypes.POINTER(native.Hyperparameters), "hyperparameters"),
        (_int64, "count"),
        (_float, "factor"),
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
    library.zenflow_route.argtypes = [ctypes.POINTER(_RoutePart), _int64]
    library.zenflow_factored_step.argtypes = [ctypes.POINTER(_FactoredStepArgs)]
    library.zenflow_factored_step.restype = ctypes.c_bool
    library.zenflow_provisional_update.argtypes = [ctypes.POINTER(_ProvisionalUpdateArgs), _int64]
    library.zenflow_adamw.argtypes = [ctypes.POINTER(_AdamwArgs), _int64]
    library.zenflow_scatter_columns.argtypes = [ctypes.POINTER(_Columns), _int64, _uint32]
    return library


class CpuKernels(Kernels):
    """Compiled loops, with rows divided among as many threads as torch uses.

    Results have the same bits for every number of threads, except sums over columns. `adamw_` has the bits of the worker's kernel.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._true, self._false = (torch.tensor(value, dtype=torch.bool, device="cpu") for value in (True, False))

    @override
    def route(
        self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool, copies: Copies = IN_ORDER
    ) -> SquaredNorms:
        """One pass over memory, except for destinations within a single row and for second selections from the same rows."""
        n_rows, n_columns = gradient.shape
        if any(destination.slot.shape[1] != n_columns for destination in destinations):
            self.copy_parts(gradient, destinations, copies)
            destinations, copies = (), IN_ORDER
        dtype, row_bytes = native.DATA_TYPES[gradient.dtype], n_columns * gradient.itemsize
        rows = gradient.new_empty(n_rows, dtype=torch.float32)
        ranges = _parts(n_rows, n_columns)
        columns = rows.new_zeros(len(ranges), n_columns) if per_axis else None
        source, row_norms = _address(gradient, gradient.dtype), rows.data_ptr()
        col_norms = 0 if columns is None else columns.data_ptr()

        def runs(begin: int, end: int, col_norms_of_part: int) -> Iterator[_RouteArgs]:
            for destination in destinations or (None,):
                first, last, outputs = begin, end, (0, 0, 0, 0)
                if destination is not None:
                    slot_begin = destination.begin // n_columns
                    first, last = max(begin, slot_begin), min(end, slot_begin + destination.slot.shape[0])
                    outputs = _outputs(destination, first - slot_begin, gradient.dtype)
                if first < last:
                    norms = row_norms + first * _FLOAT_BYTES, col_norms_of_part
                    yield _RouteArgs(source + first * row_bytes, last - first, n_columns, *norms, *outputs, dtype)

        parts = []
        for number, (begin, end) in enumerate(ranges):
            table = [*runs(begin, end, col_norms + number * n_columns * _FLOAT_BYTES if col_norms else 0)]
            parts.append(((_RouteArgs * len(table))(*table), len(table)))
        with copies:
            _run(self._library.zenflow_route, _RoutePart, parts)
        for destination in destinations:
            for selection in destination.selections[1:]:
                self.select(destination.part_of(gradient), selection)
        total = rows.sum(0, keepdim=True, dtype=torch.float64)
        if columns is None:
            return SquaredNorms(parts=total)
        of_columns = columns if len(ranges) == 1 else columns.sum(0, keepdim=True)
        return SquaredNorms(parts=total, per_axis=(rows.unsqueeze(0), of_columns))

    @override
    def factored_step_(
        self, moment: SecondMoment, squared_norms: SquaredNorms, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        # One part each, see `route`.
        rows, columns = squared_norms.per_axis
        n_rows, n_columns = rows.numel(), columns.numel()
        row_scale, col_scale = rows.new_empty(n_rows, 1), rows.new_empty(1, n_columns)
        norms = _address(rows, torch.float32), n_rows, _address(columns, torch.float32), n_columns
        state = [_address(t, torch.float32, n) for t, n in zip(moment, (n_rows, n_columns, 1), strict=True)]
        outputs = row_scale.data_ptr(), col_scale.data_ptr()
        args = _FactoredStepArgs(*norms, *state, *outputs, beta2, lr, float(scale))
        finite = self._library.zenflow_factored_step(args)
        return Factors(row_scale=row_scale, col_scale=col_scale, finite=self._true if finite else self._false)

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        n_rows, n_columns = weights.shape
        bits = _address(noise.draw_tile(), torch.int32, NOISE_NUMEL)
        if not factors.finite:
            return
        row_scale, col_scale = factors.row_scale.contiguous(), factors.col_scale.contiguous()
        dtype, row_bytes = native.DATA_TYPES[weights.dtype], n_columns * weights.itemsize
        target, source = _address(weights, weights.dtype), _address(gradient, weights.dtype, weights.numel())
        rows, columns = _address(row_scale, torch.float32, n_rows), _address(col_scale, torch.float32, n_columns)

        parts = []
        for begin, end in _parts(n_rows, n_columns):
            outputs = target + begin * row_bytes, source + begin * row_bytes, end - begin, n_columns
            scales = rows + begin * _FLOAT_BYTES, columns, bits, NOISE_NUMEL - 1, begin * n_columns, size
            parts.append((*outputs, *scales, dtype))
        _run(self._library.zenflow_provisional_update, _ProvisionalUpdateArgs, parts)

    @override
    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        if not scale.finite:
            weights.copy_(state[0])
            return
        values = ctypes.pointer(native.Hyperparameters(**vars(h)))
        steps, factor, dtype = int(scale.count), float(scale.factor), native.DATA_TYPES[weights.dtype]
        n, kinds = gradient.numel(), (*[torch.float32] * 3, weights.dtype, weights.dtype)
        begins = [
            (_address(t, kind, n), kind.itemsize) for t, kind in zip((*state, gradient, weights), kinds, strict=True)
        ]

        parts = []
        for begin, end in _parts(n, 1):
            addresses = (address + begin * n_bytes for address, n_bytes in begins)
            parts.append((*addresses, end - begin, values, steps, factor, dtype))
        _run(self._library.zenflow_adamw, _AdamwArgs, parts)

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


def _outputs(destination: Destination, row: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Addresses of a row of a destination's slot and of the column indices of its first selection, 0 for all; their number; address of a
    row of its entries.
    """
    slot = destination.slot
    to = _address(slot, dtype) + row * slot.shape[1] * slot.itemsize
    if not destination.selections:
        return to, 0, 0, 0
    columns, entries = destination.selections[0].columns, destination.selections[0].entries
    n_selected = entries.shape[1]
    first = _address(entries, dtype) + row * n_selected * entries.itemsize
    return to, 0 if columns is None else _address(columns, torch.int64, n_selected), n_selected, first


def _parts(n_rows: int, n_columns: int) -> list[tuple[int, int]]:
    """(first row, one past the last row) of the parts for the threads."""
    n = max(1, min(torch.get_num_threads(), n_rows, n_rows * n_columns // _SMALLEST_PART))
    return [(n_rows * i // n, n_rows * (i + 1) // n) for i in range(n)]


def _run(function: Callable[..., None], kind: type[ctypes.Structure], parts: Sequence[tuple[Any, ...]]) -> None:
    """Calls a function of the library with a table of its arguments."""
    function((kind * len(parts))(*(kind(*part) for part in parts)), len(parts))
