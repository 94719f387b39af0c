"""The choice of an implementation of `Kernels` for a device."""

import logging
import os

import torch

from lightning_zenflow.kernels.base import Kernels

_log = logging.getLogger(__name__)

_VARIABLE = "ZENFLOW_KERNELS"
"""Environment variable that overrules the choice."""


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation on a device, or the one that ``ZENFLOW_KERNELS`` names: "torch", "triton" or "cpu".

    Triton that cannot compile or run its kernels is replaced by torch, with a warning.

    Raises:
        ValueError: the variable has another value, or names "cpu" for another device.
    """
    fastest = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch")
    name = os.environ.get(_VARIABLE) or fastest
    # Imported on demand: not every installation has Triton, and a GPU run does not need the compiled library.
    if name == "triton":
        return _triton_or_torch(device)
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"{_VARIABLE} must be torch or triton for training on {device.type}, got 'cpu'")
        from lightning_zenflow.kernels.cpu import CpuKernels

        return CpuKernels()
    if name != "torch":
        raise ValueError(f"{_VARIABLE} must be torch, triton or cpu, or not be set, got {name!r}")
    return Kernels()


def _triton_or_torch(device: torch.device) -> Kernels:
    try:
        from lightning_zenflow.kernels.triton import TritonKernels

        kernels = TritonKernels()
        # The first launch compiles Triton's own launcher, for which it needs a C compiler and Python's headers.
        kernels.squared_norms(torch.zeros(1, 1, dtype=torch.float32, device=device), per_axis=False)
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
    return kernels
