"""The passes of `kernels` on a CPU, by the compiled library of ``csrc/device_kernels.h``."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow import protocol
from lightning_zenflow.clipping import StepScale
from lightning_zenflow.executable import device_library
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.kernels import Destination, Kernels, Selection, Statistics
from lightning_zenflow.provisional import RoundingNoise

_SMALLEST_PART = 1 << 18
"""Elements; less is not worth a thread."""

_pointer, _int64, _uint32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(device_library()))
    library.zenflow_take.argtypes = [
        _pointer, _uint32, _int64, _int64, _pointer, _pointer, _pointer, _pointer, _int64, _pointer,
    ]  # fmt: skip
    library.zenflow_stand_in.argtypes = [
        _pointer, _pointer, _uint32, _int64, _int64, _pointer, _pointer, _pointer, _int64, _int64,
    ]  # fmt: skip
    library.zenflow_adamw.argtypes = [
        _pointer, _pointer, _pointer, _pointer, _pointer, _uint32, _int64, _pointer, _int64, ctypes.c_float,
    ]  # fmt: skip
    library.zenflow_gather_columns.argtypes = [_pointer, _uint32, _int64, _int64, _pointer, _int64, _pointer]
    library.zenflow_scatter_columns.argtypes = [_pointer, _uint32, _int64, _int64, _pointer, _int64, _pointer]
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

    @override
    def statistics(self, gradient: Tensor, *, directions: bool) -> Statistics:
        return self.take(gradient, (), directions=directions)

    @override
    def take(self, gradient: Tensor, destinations: Sequence[Destination], *, directions: bool) -> Statistics:
        """One pass over memory, but for pieces of a single row and for second selections from the same rows."""
        n_rows, n_columns = gradient.shape
        if any(destination.page.shape[1] != n_columns for destination in destinations):
            return super().take(gradient, destinations, directions=directions)
        sinks = [_Sink.of(d, n_columns) for d in destinations] or [_Sink(begin=0, end=n_rows)]
        parts = _parts(n_rows, n_columns)
        rows = torch.empty(n_rows)
        columns = torch.zeros(len(parts), n_columns) if directions else None

        def run(part: int, begin: int, end: int) -> None:
            column_energy = None if columns is None else _address(columns, part)
            for sink in sinks:
                first, last = max(begin, sink.begin), min(end, sink.end)
                if first < last:
                    self._library.zenflow_take(
                        _address(gradient, first),
                        protocol.DATA_TYPES[gradient.dtype],
                        last - first,
                        n_columns,
                        _address(rows, first),
                        column_energy,
                        *sink.addresses(first),
                    )

        _in_parallel(run, parts)
        for destination, sink in zip(destinations, sinks, strict=False):
            self.select(destination.part_of(gradient), [s for s in destination.selections if s is not sink.selection])
        return Statistics(
            total=rows.double().sum(),
            rows=rows if directions else None,
            columns=None if columns is None else columns.sum(0),
        )

    @override
    def stand_in_(
        self,
        weights: Tensor,
        gradient: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        noise: RoundingNoise,
        finite: Tensor,
    ) -> None:
        n_rows, n_columns = weights.shape
        bits = noise.draw_tile()
        if not finite:
            return
        of_rows, of_columns = of_rows.contiguous(), of_columns.contiguous()

        def run(_: int, begin: int, end: int) -> None:
            self._library.zenflow_stand_in(
                _address(weights, begin),
                _address(gradient, begin),
                protocol.DATA_TYPES[weights.dtype],
                end - begin,
                n_columns,
                _address(of_rows, begin),
                _address(of_columns),
                _address(bits),
                bits.numel() - 1,
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
        self._copy_columns(self._library.zenflow_gather_columns, matrix, columns, selected)

    @override
    def scatter_columns(self, matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        self._copy_columns(self._library.zenflow_scatter_columns, matrix, columns, selected)

    def _copy_columns(self, copy: Callable[..., None], matrix: Tensor, columns: Tensor, selected: Tensor) -> None:
        n_rows, n_columns = matrix.shape

        def run(_: int, begin: int, end: int) -> None:
            copy(
                _address(matrix, begin),
                protocol.DATA_TYPES[matrix.dtype],
                end - begin,
                n_columns,
                _address(columns),
                columns.numel(),
                _address(selected, begin),
            )

        _in_parallel(run, _parts(n_rows, n_columns))


@dataclass(frozen=True, kw_only=True)
class _Sink:
    """Rows [begin, end) of a gradient, and where the compiled pass puts them."""

    begin: int
    end: int
    page: Tensor | None = None
    selection: Selection | None = None

    @classmethod
    def of(cls, destination: Destination, n_columns: int) -> "_Sink":
        """The rows of a destination, with the first of its selections that names columns."""
        begin = destination.begin // n_columns
        selection = next((s for s in destination.selections if s.columns is not None), None)
        return cls(begin=begin, end=begin + len(destination.page), page=destination.page, selection=selection)

    def addresses(self, row: int) -> tuple[int | None, int | None, int, int | None]:
        """Copy, indices, their number and selected entries, from one of the gradient's rows on."""
        copy = None if self.page is None else _address(self.page, row - self.begin)
        if self.selection is None or self.selection.columns is None:
            return copy, None, 0, None
        columns = self.selection.columns
        return copy, _address(columns), columns.numel(), _address(self.selection.target, row - self.begin)


def _address(tensor: Tensor, row: int = 0) -> int:
    """Where a row of a contiguous tensor begins."""
    return int(tensor.data_ptr()) + row * tensor.stride(0) * tensor.element_size()


def _parts(n_rows: int, n_columns: int) -> list[tuple[int, int, int]]:
    """(number, first row, one past the last row) of the pieces that are worth a thread each."""
    n = max(1, min(torch.get_num_threads(), n_rows, n_rows * n_columns // _SMALLEST_PART))
    return [(i, n_rows * i // n, n_rows * (i + 1) // n) for i in range(n)]


def _in_parallel(run: Callable[[int, int, int], None], parts: Sequence[tuple[int, int, int]]) -> None:
    """Calls `run` with each part. The library is entered without Python's lock, so they run side by side."""
    if len(parts) == 1:
        run(*parts[0])
        return
    for done in [_threads(len(parts)).submit(run, *part) for part in parts]:
        done.result()
