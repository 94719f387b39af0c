"""Inputs of the estimate."""

import dataclasses
import math
from dataclasses import dataclass

from lightning_zenflow.estimate.shapes import ModelShapes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training and the machine that it runs on. 1 GB is 1e9 bytes.

    Raises:
        ValueError: a number is not positive and finite, or there are more GPUs than parameters.
    """

    model: ModelShapes
    step_ms: float
    """Duration of an optimizer step of ZeRO-2 without offload in ms: all micro-batches, communication, AdamW on the GPU."""
    gpus: int
    """Number over all hosts."""
    gpu_mem: float
    """Memory of one GPU in GB."""
    pcie: float
    """Bandwidth between one GPU and page-locked host memory in each direction, in GB/s."""
    cpu_bw: float
    """Memory bandwidth of one host (STREAM triad), shared by its ranks, in GB/s."""
    link: float | None = None
    """Bandwidth between GPUs in each direction, in GB/s; None: they exchange over PCIe, with `pcie`."""
    gpus_per_host: int = 8
    cpu_cores: int | None = None
    """Physical cores of one host; None: at least one for each 10 GB/s of `cpu_bw`, so that memory limits the worker."""
    host_mem: float = math.inf
    """Memory of one host in GB."""
    dtype_bytes: int = 2
    """b, bytes of a weight and of a gradient: 2 (bf16, fp16) or 4 (fp32)."""
    accumulate_grad_batches: int = 1
    """Micro-batches in an optimizer step."""

    def __post_init__(self) -> None:
        """Validates all fields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (0 < value < math.inf or value == field.default):
                raise ValueError(f"{field.name} must be a finite number > 0, got {value!r}")
        if self.gpus > self.model.numel:
            raise ValueError(f"gpus must be at most the number of parameters, {self.model.numel}, got {self.gpus}")

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share the memory of the fullest host."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def partition_numel(self) -> int:
        """P / N, rounded up: ZeRO's partitions are equal but for padding."""
        return -(-self.model.numel // self.gpus)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, frozen ones included; ZeRO-2 replicates them on every GPU."""
        return self.dtype_bytes * (self.model.numel + self.model.frozen_numel)

    @property
    def gather_ms(self) -> float:
        """Exchange of the ranks' new weights at the end of a step, part of `step_ms`: each GPU receives those of the others. Nothing hides
        it in ZeRO-2, and no copy or CPU work of d = 0 hides behind it.
        """
        return self.dtype_bytes * self.model.numel * (1 - 1 / self.gpus) / (self.link or self.pcie) / 1e6

    @property
    def rank_bytes_per_s(self) -> float:
        """Host memory bandwidth of one rank while all ranks of its host use it."""
        return self.cpu_bw * 1e9 / self.ranks_per_host
