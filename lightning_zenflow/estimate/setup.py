"""Inputs of the estimate."""

import dataclasses
import math
from dataclasses import dataclass

from lightning_zenflow.estimate.shapes import ModelShapes

_MAX_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters`: gathered at a time."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training and the machine that it runs on. 1 GB is 1e9 bytes.

    Raises:
        ValueError: a number is not positive and finite, there are more GPUs than parameters, or there is no such stage.
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
    stage: int = 2
    """Of ZeRO: 2 (or 1), every GPU has all weights; 3, each has a part, and gathers a layer's before it runs."""
    offload_parameters: bool = False
    """Whether weights are in host memory, under stage 3."""
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
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, got {self.stage!r}")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"stage must be 3 where offload_parameters is true, got {self.stage!r}")
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
        """Bytes of the weights on one GPU, frozen ones included: all of them, or under stage 3 its part and those that are gathered."""
        numel = self.model.numel + self.model.frozen_numel
        if self.stage < 3:
            return self.dtype_bytes * numel
        part = 0 if self.offload_parameters else -(-numel // self.gpus)
        is_gathered = self.gpus > 1 or self.offload_parameters
        return self.dtype_bytes * min(numel, part + is_gathered * _MAX_LIVE_PARAMETERS)

    @property
    def gather_ms(self) -> float:
        """Exchange of the ranks' new weights at the end of a step, part of `step_ms`: each GPU receives those of the others. Nothing hides
        it in ZeRO-2, and no copy or CPU work of d = 0 hides behind it. Under stage 3 weights are gathered where they are used.
        """
        if self.stage == 3:
            return 0.0
        return self.dtype_bytes * self.model.numel * (1 - 1 / self.gpus) / (self.link or self.pcie) / 1e6

    @property
    def rank_bytes_per_s(self) -> float:
        """Host memory bandwidth of one rank while all ranks of its host use it."""
        return self.cpu_bw * 1e9 / self.ranks_per_host
