"""The implementations of `Kernels` on the devices they run on, as parameters of tests; see the fixture `on` of test_conformance."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import CpuKernels, Elements, Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def group(**options: Any) -> GroupHyperparameters:
    defaults = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
    return GroupHyperparameters(**{**defaults, **options})


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An implementation on a device."""

    name: Literal["torch", "cpu", "triton"]
    device_type: Literal["cpu", "cuda"]
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.device_type}" + ("-threads" if self.threads > 1 else "")

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs it, slowly."""
        return self.name == "triton" and self.device_type == "cpu"

    @cached_property
    def kernels(self) -> Kernels:
        if self.name == "triton":
            from lightning_zenflow.kernels.triton import TritonKernels

            return TritonKernels()
        return Kernels() if self.name == "torch" else CpuKernels()

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def tensor(self, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=self.device)

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same normal numbers on every device."""
        return random(*shape, seed=seed, dtype=dtype).to(self.device)

    def adamw_(
        self,
        elements: Elements,
        h: GroupHyperparameters,
        number: int,
        *,
        count: float,
        factor: float,
    ) -> None:
        """One exact step; a factor that is not finite makes it one that is skipped."""
        scale = StepScale(
            factor=self.tensor(factor),
            finite=self.tensor(factor == factor),
            norm=self.tensor(1.0),
            count=self.tensor(float(count), torch.float64),
        )
        self.kernels.adamw_(elements, h, scale, number)


TORCH, COMPILED = (Implementation(name=name, device_type="cpu") for name in ("torch", "cpu"))
THREADS = [
    Implementation(name="torch", device_type="cpu", threads=3),
    Implementation(name="cpu", device_type="cpu", threads=3),
]
"""Work is cut among threads only where there is much of it."""
INTERPRETED = Implementation(name="triton", device_type="cpu")
ON_GPU = [Implementation(name=name, device_type="cuda") for name in ("torch", "triton")]
ALL = [TORCH, COMPILED, INTERPRETED, *ON_GPU]


def parameter(implementation: Implementation, *others: Any, slow: bool = False) -> Any:
    name = "-".join(map(str, (implementation, *others)))
    marks = [pytest.mark.gpu] * (implementation.device_type == "cuda") + [pytest.mark.slow] * slow
    return pytest.param(implementation, *others, id=name, marks=marks)


def each_with(sizes: Iterable[Any], *, large: int = 140_000, interpreted: int = 140_000) -> list[Any]:
    """Parameters (`on`, size): with the interpreter only smaller ones than `interpreted`, all but one of them slow; large ones also on
    several threads."""
    numel = {size: prod(size) if isinstance(size, tuple) else size for size in sizes}
    fast = max((n for n in numel.values() if n < min(interpreted, 10_000)), default=0)
    parameters = []
    for size, n in numel.items():
        for on in ALL:
            if n < interpreted or not on.is_interpreted:
                parameters.append(parameter(on, size, slow=on.is_interpreted and n != fast))
        parameters += [parameter(on, size) for on in THREADS if n >= large]
    return parameters
