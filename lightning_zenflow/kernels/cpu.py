"""The passes of `kernels` on a CPU, by the compiled library of ``csrc/device_kernels.h``."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Destination, Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import NOISE_NUMEL, Factors, RoundingNoise, SecondMoment
from lightning_zenflow.native import protocol
from lightning_zenflow.native.paths import device_library

_SMALLEST_PART = 1 << 18
"""Elements; less is not worth a thread."""

_FLOAT_BYTES = 4

_pointer, _int64, _uint32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(device_library()))
    library.zenflow_take.argtypes = [
        _pointer, _uint32, _int64, _int64, _pointer, _pointer, _pointer, _pointer, _int64, _pointer,
    ]  # fmt: skip
    library.zenflow_factored_step.argtypes = [
        _pointer, _int64, _pointer, _int64, ctypes.c_float, ctypes.c_double, ctypes.c_double,
        _pointer, _pointer, _pointer, _pointer, _pointer,
    ]  # fmt: skip
    library.zenflow_factored_step.restype = ctypes.c_bool
    library.zenflow_stand_in.argtypes = [
        _pointer, _pointer, _uint32, _int64, _int64, _pointer, ctypes.c_float, _pointer, _pointer, _int64, _int64,
    ]  # fmt: skip
    library.zenflow_adamw.argtypes = [
        _pointer, _pointer, _pointer, _pointer, _pointer, _uint32, _int64, _pointer, _int64, ctypes.c_float,
    ]  # fmt: skip
    library.zenflow_gather_columns.argtypes = [_pointer, _uint32, _int64, _int64, _pointer, _int64, _pointer]
    library.zenflow_scatter_columns.argtypes = [_pointer, _int64, _uint32]
    return library


@cache
def _threads(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="zenflow-device")


class CpuKernels(Kernels):
    """By compiled loops, cut by rows among as many threads as torch uses.

    The same bits for every number of threads, but for column sums. `adamw_` has the bits of the worker's kernel.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._true, self._false = torch.tensor(True), torch.tensor(False)

    @override
    def squared_norms(self, gradient: Tensor, *, per_axis: bool) -> SquaredNorms:
        return self.route(gradient, (), per_axis=per_axis)

    @override
    def route(self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool) -> SquaredNorms:
        """One pass over memory, but for pieces of a single row and for second selections from the same rows."""
        n_rows, n_columns = gradient.shape
        if any(destination.slot.shape[1] != n_columns for destination in destinations):
            return super().route(gradient, destinations, per_axis=per_axis)
        sinks = [_Sink.of(d, n_columns) for d in destinations] or [_Sink(end=n_rows)]
        parts = _parts(n_rows, n_columns)
        dtype, row_bytes = protocol.DATA_TYPES[gradient.dtype], n_columns * gradient.itemsize
        rows = torch.empty(n_rows)
        columns = torch.zeros(len(parts) * n_columns) if per_axis else None
        source, row_squared_norms, column_squared_norms = (
            gradient.data_ptr(),
            rows.data_ptr(),
            0 if columns is None else columns.data_ptr(),
        )

        def run(part: int, begin: int, end: int) -> None:
            for sink in sinks:
                first, last = max(begin, sink.begin), min(end, sink.end)
                if first < last:
                    self._library.zenflow_take(
                        source + first * row_bytes,
                        dtype,
                        last - first,
                        n_columns,
                        row_squared_norms + first * _FLOAT_BYTES,
                        _beyond(column_squared_norms, part * n_columns * _FLOAT_BYTES),
                        _beyond(sink.slot, (first - sink.begin) * row_bytes),
                        sink.columns,
                        sink.n_selected,
                        _beyond(sink.selected, (first - sink.begin) * sink.selected_row_bytes),
                    )

        _in_parallel(run, parts)
        for destination in destinations:
            if len(destination.selections) > 1:
                self.select(destination.part_of(gradient), destination.selections[1:])
        return SquaredNorms(
            total=rows.sum(dtype=torch.float64),
            rows=rows if per_axis else None,
            columns=columns if columns is None or len(parts) == 1 else columns.view(len(parts), n_columns).sum(0),
        )

    @override
    def factored_step_(
        self, moment: SecondMoment, rows: Tensor, columns: Tensor, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        n_rows, n_columns = rows.shape[0], columns.shape[0]
        row_scale, col_scale = torch.empty(n_rows, 1), torch.empty(1, n_columns)
        finite = self._library.zenflow_factored_step(
            rows.data_ptr(),
            n_rows,
            columns.data_ptr(),
            n_columns,
            float(scale),
            beta2,
            lr,
            *(tensor.data_ptr() for tensor in moment.tensors()),
            row_scale.data_ptr(),
            col_scale.data_ptr(),
        )
        return Factors(row_scale=row_scale, col_scale=col_scale, finite=self._true if finite else self._false)

    @override
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
        n_rows, n_columns = weights.shape
        bits = noise.draw_address()
        if not finite:
            return
        row_scale, col_scale = row_scale.contiguous(), col_scale.contiguous()
        dtype, row_bytes = protocol.DATA_TYPES[weights.dtype], n_columns * weights.itemsize
        target, source, rows, columns = (t.data_ptr() for t in (weights, gradient, row_scale, col_scale))

        def run(_: int, begin: int, end: int) -> None:
            self._library.zenflow_stand_in(
                target + begin * row_bytes,
                source + begin * row_bytes,
                dtype,
                end - begin,
                n_columns,
                rows + begin * _FLOAT_BYTES,
                size,
                columns,
                bits,
                NOISE_NUMEL - 1,
                begin * n_columns,
            )

        _in_parallel(run, _parts(n_rows, n_columns))

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
        if not scale.finite:
            weights.copy_(state[0])
            return
        h = hyperparameters
        values = protocol.Hyperparameters(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, int(h.decoupled))
        steps, factor = int(count), float(scale.factor)

        def run(_: int, begin: int, end: int) -> None:
            self._library.zenflow_adamw(
                *(_address(values_of_all, begin) for values_of_all in state),
                _address(gradient, begin),
                _address(weights, begin),
                protocol.DATA_TYPES[weights.dtype],
                end - begin,
                ctypes.byref(values),
                steps,
                factor,
            )

        _in_parallel(run, _parts(gradient.numel(), 1))

    @override
    def gather_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        n_rows, n_columns = matrix.shape
        dtype, row_bytes = protocol.DATA_TYPES[matrix.dtype], n_columns * matrix.itemsize
        n_selected = columns.shape[0]
        first, indices, first_selected = matrix.data_ptr(), columns.data_ptr(), selected.data_ptr()

        def run(_: int, begin: int, end: int) -> None:
            self._library.zenflow_gather_columns(
                first + begin * row_bytes,
                dtype,
                end - begin,
                n_columns,
                indices,
                n_selected,
                first_selected + begin * n_selected * matrix.itemsize,
            )

        _in_parallel(run, _parts(n_rows, n_columns))

    @override
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self.column_writer([ColumnWrite(matrix=matrix, columns=columns, selected=selected)])()

    @override
    def column_writer(self, writes: Sequence[ColumnWrite]) -> Callable[[], None]:
        n = max(1, min(torch.get_num_threads(), sum(w.selected.numel() for w in writes) // _SMALLEST_PART))
        tables = [_table(writes, part, n) for part in range(n)]
        return partial(self._write_columns, tables, list(writes))

    def _write_columns(self, tables: Sequence[Any], writes: Sequence[ColumnWrite]) -> None:
        """Carries the tables out, each on a thread of its own; they point into the tensors of `writes`."""
        if not writes:
            return
        dtype = protocol.DATA_TYPES[writes[0].matrix.dtype]

        def run(part: int, _: int, __: int) -> None:
            self._library.zenflow_scatter_columns(tables[part], len(tables[part]), dtype)

        _in_parallel(run, [(part, 0, 0) for part in range(len(tables))])


class _ColumnWrite(ctypes.Structure):
    """`zenflow_column_write`."""

    _fields_ = (
        ("matrix", _pointer),
        ("rows", _int64),
        ("width", _int64),
        ("indices", _pointer),
        ("n_selected", _int64),
        ("selected", _pointer),
    )


def _table(writes: Sequence[ColumnWrite], part: int, n_parts: int) -> Any:
    """One of `n_parts` shares of the writes' rows, as an array of `_ColumnWrite`."""
    entries = []
    for write in writes:
        n_rows, width = write.matrix.shape
        n_selected = write.selected.shape[1]
        if n_selected == 0:
            continue
        begin, end = n_rows * part // n_parts, n_rows * (part + 1) // n_parts
        entries.append(
            _ColumnWrite(
                matrix=_address(write.matrix, begin),
                rows=end - begin,
                width=width,
                indices=None if write.columns is None else write.columns.data_ptr(),
                n_selected=n_selected,
                selected=_address(write.selected, begin),
            )
        )
    return (_ColumnWrite * len(entries))(*entries)


class _Sink(NamedTuple):
    """Rows [begin, end) of a gradient, and the addresses that the compiled pass puts them at, 0 for none. A tuple: one is made for every
    gradient.
    """

    begin: int = 0
    end: int = 0
    slot: int = 0
    columns: int = 0
    """Indices of the first selection's columns; 0: all of them."""
    n_selected: int = 0
    selected: int = 0
    selected_row_bytes: int = 0

    @classmethod
    def of(cls, destination: Destination, n_columns: int) -> "_Sink":
        """The rows of a destination, with the first of its selections."""
        begin, slot = destination.begin // n_columns, destination.slot
        end = begin + slot.shape[0]
        if not destination.selections:
            return cls(begin, end, slot.data_ptr())
        columns, target = destination.selections[0].columns, destination.selections[0].target
        n_selected = n_columns if columns is None else columns.shape[0]
        return cls(
            begin,
            end,
            slot.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            n_selected,
            target.data_ptr(),
            n_selected * slot.itemsize,
        )


def _beyond(address: int, n_bytes: int) -> int:
    """The address so many bytes further on; none stays none."""
    return address + n_bytes if address else 0


def _address(tensor: Tensor, row: int = 0) -> int:
    """Where a row of a contiguous tensor begins."""
    return int(tensor.data_ptr()) + row * tensor.stride(0) * tensor.element_size()


def _parts(n_rows: int, n_columns: int) -> list[tuple[int, int, int]]:
    """(number, first row, one past the last row) of the pieces that are worth a thread each."""
    n = min(torch.get_num_threads(), n_rows, n_rows * n_columns // _SMALLEST_PART)
    if n <= 1:
        return [(0, 0, n_rows)]
    return [(i, n_rows * i // n, n_rows * (i + 1) // n) for i in range(n)]


def _in_parallel(run: Callable[[int, int, int], None], parts: Sequence[tuple[int, int, int]]) -> None:
    """Calls `run` with each part. The library is entered without Python's lock, so they run side by side."""
    if len(parts) == 1:
        run(*parts[0])
        return
    for done in [_threads(len(parts)).submit(run, *part) for part in parts]:
        done.result()
