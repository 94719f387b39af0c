"""Inputs of the cost model: the machine and the training. 1 GB is 1e9 bytes."""

import math
from dataclasses import dataclass

from lightning_zenflow.config import ConfigValueError
from lightning_zenflow.core.allowed_values import Domain, integer
from lightning_zenflow.estimate.shapes import ModelShapes
from lightning_zenflow.schedule.staggered import LARGEST_BUCKET

GB = 1e9

_COUNT = integer(1)
_POSITIVE = Domain(
    "a finite number > 0", lambda x: isinstance(x, int | float) and x is not True and 0 < x < math.inf, float
)
_DTYPE_BYTES = Domain("2 or 4", lambda x: x in (2, 4), int)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware.

    Raises:
        ConfigValueError: a value is not allowed.
    """

    gpus: int
    """Number over all hosts, an integer >= 1."""
    gpu_mem: float
    """Memory of one GPU in GB, > 0."""
    pcie: float
    """Bandwidth between one GPU and page-locked host memory in each direction, in GB/s, > 0."""
    cpu_bw: float
    """Memory bandwidth of one host (STREAM triad), shared by its ranks, in GB/s, > 0."""
    gpus_per_host: int = 8
    """An integer >= 1."""
    cpu_cores: int | None = None
    """Physical cores of one host, an integer >= 1; None: at least one for each 10 GB/s of `cpu_bw`, so that memory limits the worker."""
    host_mem: float | None = None
    """Memory of one host in GB, > 0; None: unknown."""

    def __post_init__(self) -> None:
        """Validates all fields."""
        _check(self, _COUNT, "gpus", "gpus_per_host", "cpu_cores")
        _check(self, _POSITIVE, "gpu_mem", "pcie", "cpu_bw", "host_mem")

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share the memory of the fullest host."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def pcie_bytes_per_s(self) -> float:
        """`pcie` in bytes/s."""
        return self.pcie * GB

    @property
    def rank_bytes_per_s(self) -> float:
        """Host memory bandwidth of one rank while all ranks of its host use it, in bytes/s."""
        return self.cpu_bw * GB / self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training.

    Raises:
        ConfigValueError: a value is not allowed.
    """

    model: ModelShapes
    step_ms: float
    """Duration of an optimizer step of ZeRO-2 without offload in ms, > 0: all micro-batches, communication, AdamW on the GPU."""
    dtype_bytes: int = 2
    """b, bytes of a weight and of a gradient: 2 (bf16, fp16) or 4 (fp32)."""
    accumulate_grad_batches: int = 1
    """Micro-batches in an optimizer step, an integer >= 1."""
    reduce_bucket_size: int | None = None
    """Elements of one of DeepSpeed's two gradient buckets, an integer >= 1; None: the default of Lightning's DeepSpeedStrategy, and
    `buckets.bucket_size` for ZenFlow."""

    def __post_init__(self) -> None:
        """Validates all fields."""
        _check(self, _POSITIVE, "step_ms")
        _check(self, _DTYPE_BYTES, "dtype_bytes")
        _check(self, _COUNT, "accumulate_grad_batches", "reduce_bucket_size")

    @property
    def step_s(self) -> float:
        """`step_ms` in seconds."""
        return self.step_ms / 1e3

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, frozen ones included; ZeRO-2 replicates them on every GPU."""
        return self.dtype_bytes * (self.model.numel + self.model.frozen_numel)

    def bucket_bytes(self, default: int = LARGEST_BUCKET) -> int:
        """Bytes of ZeRO-2's two gradient buckets, which `overlap_comm` (Lightning's default) needs.

        Args:
            default: elements of a bucket where `reduce_bucket_size` is None.
        """
        return 2 * self.dtype_bytes * (self.reduce_bucket_size or default)

    def partition_numel(self, gpus: int) -> int:
        """P / N, rounded up: ZeRO's partitions are equal but for padding."""
        return -(-self.model.numel // gpus)


def _check(inputs: Machine | Workload, domain: Domain, *keys: str) -> None:
    for key in keys:
        value = getattr(inputs, key)
        if value is not None and not domain.contains(value):
            raise ConfigValueError(f"{key} must be {domain.text}, got {value!r}", key)
