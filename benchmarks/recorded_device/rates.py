"""Rates of machines, and how long a recorded operation takes on them at a model's true size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.recorded_device.clocks import Operation

_MODEL = ("", "strategy.training_step", "strategy.backward", "strategy.optimizer_step")
"""Places of operations that are the model's own."""

CALL_S = 18.9e-3 / 1139
"""A call from Python that enqueues something. `benchmarks.step_time.bookkeeping` measured 18.9 ms a step of 137 narrow tensors, all of
Lightning, DeepSpeed, the model and this package together, and the recording of that step (`record_gpt(model=150e6)`) has 1,139 calls. Two
shared cores; hosts of GPUs are faster."""

LAUNCH_S = 2e-6
"""Shortest time between two operations of one stream, an assumption."""

MATMUL_SHARE = 0.65
"""Of the nominal peak that large matrix products reach, an assumption."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A machine with one GPU; bytes and floating-point operations in a second."""

    matmul: float
    memory: float
    """Of the device."""
    pcie: float
    """Page-locked copies in one direction; each has a copy engine of its own."""
    worker: float
    """Of the host's memory, by the worker."""
    call_s: float = CALL_S
    launch_s: float = LAUNCH_S


# Data sheets: dense bf16 with fp32 sums, device memory. PCIe 5.0 and 4.0 x16: 50 and 25 GB/s of nominal 63 and 31.5 (docs/estimate.md).
# The worker's: a share of eight in two sockets of 8 channels DDR5-4800 (614 GB/s) or DDR4-3200 (410 GB/s), and all of two channels
# DDR5-5200 (83 GB/s), of which STREAM is taken to reach four fifths.
DEVICES = {
    "h200": Rates(matmul=MATMUL_SHARE * 989e12, memory=4.8e12, pcie=50e9, worker=0.8 * 614e9 / 8),
    "a100": Rates(matmul=MATMUL_SHARE * 312e12, memory=2.0e12, pcie=25e9, worker=0.8 * 410e9 / 8),
    "4090": Rates(matmul=MATMUL_SHARE * 165e12, memory=1.0e12, pcie=25e9, worker=0.8 * 83e9),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From a recording with a narrow model to the true size.

    The recorded model has all tensors of the true one, and its widths are smaller by w = sqrt(P / p). Bytes of published blocks and of
    jobs grow by P / p; of other matrices by P / m, since almost all of the true model's elements are in matrices; of vectors by w; single
    numbers stay. What the model itself does with activations grows by w and the number of tokens. Matrix products are scaled so that
    those of a step have 6 P floating-point operations a token; those of attention are left out.
    """

    params: float
    """P."""
    tokens: float
    """In a step."""
    recorded_params: int
    """p."""
    recorded_matrices: int
    """m, elements of the recorded model's matrices."""
    recorded_tokens: int
    recorded_flops: float
    """Of the matrix products of one recorded step."""
    matrix_numel: int
    """Elements of the smallest recorded matrix."""

    @cached_property
    def _width(self) -> float:
        return (self.params / self.recorded_params) ** 0.5

    def n_bytes(self, o: Operation) -> float:
        """Bytes that an operation copies, or reads and writes."""
        if is_models(o):
            return o.n_bytes * self._width * self.tokens / self.recorded_tokens
        if o.kind in ("h2d", "replay"):
            return o.n_bytes * self.params / self.recorded_params
        if o.numel >= self.matrix_numel:
            return o.n_bytes * self.params / self.recorded_matrices
        return o.n_bytes * self._width if o.numel > 1 else o.n_bytes

    def seconds(self, o: Operation, rates: Rates) -> float:
        """Time of an engine."""
        if o.flops:
            return o.flops * 6 * self.params * self.tokens / self.recorded_flops / rates.matmul
        rate = {"d2h": rates.pcie, "h2d": rates.pcie, "replay": rates.worker}.get(o.kind, rates.memory)
        return self.n_bytes(o) / rate


def is_models(o: Operation) -> bool:
    """Whether an operation is one of forward or backward itself."""
    return o.place in _MODEL


def flops_of(operations: Sequence[Operation]) -> float:
    """Of all matrix products."""
    return float(sum(o.flops for o in operations))
