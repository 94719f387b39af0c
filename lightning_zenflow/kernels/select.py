"""The choice of an implementation of `Kernels` for a device."""

import logging
import os

import torch

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Kernels
from lightning_zenflow.kernels.factored import RoundingNoise, SecondMoment

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
        _launch_all(kernels, device)
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


def _launch_all(kernels: Kernels, device: torch.device) -> None:
    """Launches each pass once, since each is compiled at its first launch and an error there would end training."""
    one, matrix = (
        torch.ones((), dtype=torch.float32, device=device),
        torch.zeros(2, 2, dtype=torch.bfloat16, device=device),
    )
    columns, selected = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros_like(matrix[:, :1])
    norms = kernels.squared_norms(matrix, per_axis=True)
    factors = kernels.factored_step_(SecondMoment.zeros(2, 2, device), norms, beta2=0.5, lr=0.0, scale=one)
    kernels.provisional_update_(matrix, matrix, factors, RoundingNoise(0, device))
    kernels.gather_columns(matrix, columns, selected)
    kernels.column_writer([ColumnWrite(matrix=matrix, columns=columns, selected=selected)])()
    h = GroupHyperparameters(lr=0.0, beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.0, decoupled=True)
    scale = StepScale(factor=one, finite=one.bool(), norm=one, count=one.double())
    kernels.adamw_(torch.zeros(3, 4, dtype=torch.float32, device=device), matrix.view(-1), matrix.view(-1), h, scale)
