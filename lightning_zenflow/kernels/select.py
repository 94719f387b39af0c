"""kernels.select."""

import importlib.util

import torch

from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.torch import TorchKernels


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation for a device. Imported here: neither the library nor Triton is there for every device."""
    if device.type == "cpu":
        from lightning_zenflow.kernels.cpu import CpuKernels

        return CpuKernels()
    # torch for CUDA brings it along, but not on every platform.
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lightning_zenflow.kernels.triton import TritonKernels

        return TritonKernels()
    return TorchKernels()
