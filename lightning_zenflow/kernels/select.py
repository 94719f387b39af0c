"""The choice of an implementation of `Kernels` for a device."""

import importlib.util

import torch

from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.torch import TorchKernels


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation on a device."""
    # Imported on demand: not every installation has Triton, and a GPU run does not need the compiled library.
    if device.type == "cpu":
        from lightning_zenflow.kernels.cpu import CpuKernels

        return CpuKernels()
    # torch for CUDA depends on Triton on most platforms only.
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lightning_zenflow.kernels.triton import TritonKernels

        return TritonKernels()
    return TorchKernels()
