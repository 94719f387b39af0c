"""The device's passes over gradients and weights. `Kernels`, by torch's operations, runs on any device and defines each result.
`CpuKernels` overrides passes on a CPU by the library of ``csrc/cpu_device/device_kernels.h``, `kernels.triton.TritonKernels` on CUDA.

*Provisional update*: an approximate step on host-owned weights, which would otherwise show a gradient up to S + d - 1 steps late. It is
Adam's without momentum and with a factored second moment, as in Adafactor (arXiv 1804.04235, section 3), which takes one float per row and
one per column:

    v_ij = row_i * col_j / mean(col),        w_ij <- w_ij - b * lr * c * g_ij / sqrt(v_ij).

c is the clip coefficient of the *last* step, because this step's norm is not known during backward, over this step's loss scale. Without a
step before it, c is NaN, and nothing changes. Every publish overwrites the weights with exact ones, so errors do not accumulate.
"""

import ctypes
import logging
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GradientNorms, GroupHyperparameters, StepScale
from lightning_zenflow.native import DATA_TYPES, Hyperparameters, cannot_run, worker_executable

_log = logging.getLogger(__name__)

_VARIABLE = "ZENFLOW_KERNELS"

SMALLEST = 1e-30
"""Lower bound of second moments: rows and columns below it have no gradient, so their update is zero for any divisor."""

NOISE_NUMEL = 1 << 16
"""Elements of a tile of noise."""

_NOISE_ALIGNMENT = 4
"""Elements in 16 bytes, which CUDA reads as one word; on every device, so that all draw the same bits."""

_SMALLEST_PART = 1 << 18
"""Elements of a pass of the compiled library; fewer do not pay for a thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredNorms:
    """Sums of squares of a gradient, on its device, as partial sums of the pass; not finite where the gradient is not."""

    parts: Tensor
    """[n] float32 or float64; together the whole gradient's."""
    per_axis: tuple[Tensor, ...] = ()
    """[n, rows] and [n, columns] float32; nothing without `per_axis`, nor are `rows` and `columns`."""

    @property
    def rows(self) -> Tensor:
        """[rows] float32."""
        return self.per_axis[0].sum(0)

    @property
    def columns(self) -> Tensor:
        """[columns] float32."""
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


DONE_NUMEL = 1024
"""Elements for each word of `Elements.done`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Elements that have the same coefficients, on the device."""

    state: Tensor
    """[3, n] float32: master weights, first and second moments."""
    gradient: Tensor
    """[n], model dtype."""
    weights: Tensor
    """[n], model dtype; may be the gradient."""
    done: Tensor
    """[n / `DONE_NUMEL`, rounded up] int32; number of the step that has been done, at first 0."""

    @classmethod
    def of(cls, state: Tensor, gradient: Tensor, weights: Tensor) -> "Elements":
        """Before any step."""
        n_words = -(-gradient.numel() // DONE_NUMEL)
        done = torch.zeros(n_words, dtype=torch.int32, device=gradient.device)
        return cls(state=state, gradient=gradient, weights=weights, done=done)


Copies = AbstractContextManager[None]
"""Context in which slots are written, on a stream of its own if the device has streams."""

IN_ORDER: Copies = nullcontext()
"""Copies to slots in the order of everything else."""


class SecondMoment(NamedTuple):
    """The factored second moment of one matrix's gradient; changed in place. A checkpoint has these tensors, in this order."""

    row: Tensor
    """[rows] float32; running mean over columns of the squared, clipped gradient."""
    col: Tensor
    """[columns] float32; running mean over rows."""
    n: Tensor
    """0-D float32; steps in it."""

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> "SecondMoment":
        """The second moment before the first step."""
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in ((rows,), (columns,), ())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """The factors of a provisional update w <- w - b * g * row_scale * col_scale."""

    row_scale: Tensor
    """[rows, 1] float32; includes the learning rate and the factor on the gradient."""
    col_scale: Tensor
    """[1, columns] float32."""
    finite: Tensor
    """0-D bool; if False, the gradient or its factor is not finite: no weight changes."""


class RoundingNoise:
    """Random bits for stochastic rounding: drawn once, read as tiles from random offsets, whose generator's state a checkpoint has."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        size = (2 * NOISE_NUMEL,)
        bits = torch.randint(0, 1 << 16, size, generator=generator, dtype=torch.int32, device="cpu")
        self._bits = bits.to(device)
        self.offsets = random.Random(seed)

    def draw_tile(self) -> Tensor:
        """[NOISE_NUMEL] int32, each 0 to 65535; repeated by the caller for larger tensors."""
        offset = self.offsets.randrange(0, NOISE_NUMEL, _NOISE_ALIGNMENT)
        return self._bits.narrow(0, offset, NOISE_NUMEL)


def round_stochastically_(target: Tensor, values: Tensor, noise: RoundingNoise) -> None:
    """Converts float32 values, contiguous, which are overwritten, to the model's type: bfloat16 stochastically, since rounding to nearest
    would lose all updates below half a unit, float16, 8 times finer, to nearest.
    """
    if target.dtype == torch.bfloat16:
        bits = values.view(torch.int32).view(-1)
        random_bits, repeats = noise.draw_tile(), -(-bits.numel() // NOISE_NUMEL)
        if repeats > 1:
            random_bits = random_bits.repeat(repeats)
        # Adding 16 random bits carries into the upper half with probability (lower half) / 65536.
        bits.add_(random_bits.narrow(0, 0, bits.numel())).bitwise_and_(-65536)
    target.copy_(values)


class Kernels:
    """The passes of one step, by torch's operations. Matrices are contiguous, [rows, columns]; no pass synchronises with the device.

    AdamW's order of operations is that of the worker's replay kernel. torch fuses other pairs of operations than the kernel, so the two
    agree to a few units in the last place, not bit for bit.
    """

    def route(
        self, gradient: Tensor, destinations: Sequence[Destination], *, per_axis: bool, copies: Copies = IN_ORDER
    ) -> SquaredNorms:
        """Copies disjoint parts of a gradient to their slots, within `copies`, gathers the selected columns and computes sums of squares;
        `per_axis`: those of each row and of each column as well, with the same bits of the total.
        """
        self.copy_parts(gradient, destinations, copies)
        self.select_parts(gradient, destinations)
        # The total is the sum of the rows' in float64: torch's float32 sums over long vectors are off by 1e-5.
        rows = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)
        parts = rows.double().square().sum(0, keepdim=True)
        if not per_axis:
            return SquaredNorms(parts=parts)
        columns = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=torch.float32)
        return SquaredNorms(parts=parts, per_axis=(rows.square_().unsqueeze(0), columns.square_()))

    def copy_parts(self, gradient: Tensor, destinations: Sequence[Destination], copies: Copies) -> None:
        """Copies the parts of a gradient to their slots."""
        with copies:
            for destination in destinations:
                destination.slot.copy_(destination.part_of(gradient), non_blocking=True)

    def select_parts(self, gradient: Tensor, destinations: Sequence[Destination]) -> None:
        """Gathers the selected columns of a gradient."""
        chosen = ((d.part_of(gradient), d.selection) for d in destinations if d.selection is not None)
        for part, selection in chosen:
            if selection.columns is None:
                selection.entries.copy_(part)
            else:
                torch.index_select(part, 1, selection.columns, out=selection.entries)

    def factored_step_(
        self, moment: SecondMoment, squared_norms: SquaredNorms, *, beta2: float, lr: float, scale: Tensor
    ) -> Factors:
        """Adds a step's gradient times `scale`, 0-D float32, to its second moment, unless that is not finite. The product of the factors
        that are returned is lr * scale / sqrt(v_ij), bias-corrected.
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
        """Applies w <- round(w - g * (row_scale * size) * col_scale) in place; weights and gradient are of model dtype, `size` is b."""
        update = gradient.float() * (factors.row_scale * size)
        update.mul_(factors.col_scale)
        values = torch.sub(weights.float(), torch.where(factors.finite, update, 0.0), out=update)
        round_stochastically_(weights, values, noise)

    adamw_is_repeatable = False
    """Whether an `adamw_` that an exception has cut can be called again; torch's operations are several, and heed no `Elements.done`."""

    def adamw_(self, elements: Elements, h: GroupHyperparameters, scale: StepScale, number: int) -> None:
        """Applies exact step `number`, from 1, in place; the device itself decides whether the step is applied.

        With g = gradient * factor (plus weight_decay * w for Adam), s = count:
        m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;
        w <- (1 - lr weight_decay) w - lr / (1 - beta1^s) * m / (sqrt(v / (1 - beta2^s)) + eps).

        The weights receive the rounded master weights. A second call for the same step changes nothing, if `adamw_is_repeatable`.
        """
        (master, exp_avg, exp_avg_sq), finite = elements.state, scale.finite
        one = torch.ones_like(scale.count)
        step_size, inv_sqrt_bias_correction2 = scale.coefficients(h)
        g = torch.where(finite, elements.gradient.float() * scale.factor, 0.0)
        if h.weight_decay != 0 and not h.decoupled:
            g = torch.where(finite, torch.add(g, master, alpha=h.weight_decay), 0.0)
        exp_avg.mul_(torch.where(finite, one * h.beta1, one)).add_(g, alpha=1 - h.beta1)
        exp_avg_sq.mul_(torch.where(finite, one * h.beta2, one)).addcmul_(g, g, value=1 - h.beta2)
        denominator = exp_avg_sq.sqrt().mul_(inv_sqrt_bias_correction2).add_(h.eps)
        update = torch.div(exp_avg, denominator, out=denominator)
        if h.weight_decay != 0 and h.decoupled:
            master.mul_(torch.where(finite, one * (1 - h.lr * h.weight_decay), one))
        master.sub_(torch.where(finite, update.mul_(step_size), 0.0))
        elements.weights.copy_(master)

    def block_word(self, norms: GradientNorms, block: int) -> Tensor:
        """`GradientNorms.word`, which also changes `sum` and the block's `partial`."""
        return norms.word(block)

    def column_writer(self, writes: Sequence[tuple[Tensor, Selection]]) -> Callable[[], None]:
        """Returns a function that does matrix[:, columns] <- entries for all matrices, [rows, width], model dtype; prepared once, called in
        every step, with the entries that there are then.
        """
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


class CpuKernels(Kernels):
    """Compiled loops, divided among as many threads as torch uses: results have the same bits for every number of them. `adamw_` has the
    bits of the worker's kernel.
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
            copies = IN_ORDER
        elif destinations:
            parts = [(d.begin // n_columns, len(d.slot), _address(d.slot, dtype)) for d in destinations]
        begin, norms = _address(gradient, dtype), squared_norms.data_ptr()
        with copies:
            for row, n, slot in parts:
                first, n_threads = begin + row * n_columns * dtype.itemsize, _n_threads(n, n * n_columns)
                self._library.zenflow_route(first, n, n_columns, norms + 4 * row, slot, DATA_TYPES[dtype], n_threads)
        self.select_parts(gradient, destinations)
        total = squared_norms.sum(1, dtype=torch.float64)
        if not per_axis:
            return SquaredNorms(parts=total)
        columns = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=torch.float32)
        return SquaredNorms(parts=total, per_axis=(squared_norms, columns.square_()))

    adamw_is_repeatable = True

    @override
    def adamw_(self, elements: Elements, h: GroupHyperparameters, scale: StepScale, number: int) -> None:
        if not scale.finite:
            elements.weights.copy_(elements.state[0])
            return
        n, dtype = elements.gradient.numel(), elements.weights.dtype
        self._library.zenflow_adamw(
            *(_address(values, torch.float32, n) for values in elements.state),
            *(_address(elements.gradient, dtype), _address(elements.weights, dtype, n), n),
            *(ctypes.pointer(Hyperparameters(**vars(h))), int(scale.count), float(scale.factor)),
            *(DATA_TYPES[dtype], _n_threads(n, n), _address(elements.done, torch.int32), number),
        )


@cache
def _library() -> ctypes.CDLL:
    path = worker_executable().with_name("libzenflow-device.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(cannot_run(path, error)) from error
    pointer, int64, uint32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    library.zenflow_route.argtypes = [pointer, int64, int64, pointer, pointer, uint32, int64]
    tensors, hyperparameters = [pointer] * 5, ctypes.POINTER(Hyperparameters)
    coefficients = hyperparameters, int64, ctypes.c_float
    library.zenflow_adamw.argtypes = [*tensors, int64, *coefficients, uint32, int64, pointer, ctypes.c_int32]
    return library


def _address(tensor: Tensor, dtype: torch.dtype, numel: int | None = None) -> int:
    """Address of a contiguous tensor on the CPU of this type and, if given, this length: C++ sees none of this."""
    as_promised = tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()
    assert as_promised and numel in (None, tensor.numel()), (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return tensor.data_ptr()


def _n_threads(n_rows: int, numel: int) -> int:
    return max(1, min(torch.get_num_threads(), n_rows, numel // _SMALLEST_PART))


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation on a device, or the one that ``ZENFLOW_KERNELS`` names; ValueError: it names none for the device.

    Triton that cannot compile or run its kernels is replaced by torch, with a warning.
    """
    name = os.environ.get(_VARIABLE) or {"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch")
    names = ("torch", "triton", "cpu") if device.type == "cpu" else ("torch", "triton")
    if name not in names:
        raise ValueError(f"{_VARIABLE} must be {' or '.join(names)} on {device.type}, or not be set, got {name!r}")
    if name == "cpu":
        return CpuKernels()
    if name == "triton":
        try:
            # Not every installation has Triton.
            from lightning_zenflow.kernels.triton import kernels_that_run

            return kernels_that_run(device)
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
