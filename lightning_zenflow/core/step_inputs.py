"""The factor of a step: clip coefficient over loss scale, as 0-D tensors that never leave the device. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroupHyperparameters:
    """What a step of one parameter group needs besides the gradient; a scheduler may change any of it at any step."""

    lr: float
    """Learning rate, >= 0."""
    beta1: float
    """Decay of the first moment per step, 0 <= beta1 < 1."""
    beta2: float
    """Decay of the second moment per step, 0 <= beta2 < 1."""
    eps: float
    """Added to the root of the second moment, >= 0."""
    weight_decay: float
    """Coefficient of the decay, >= 0."""
    decoupled: bool
    """True: AdamW, the decay acts on the weight; False: Adam, it is added to the gradient."""


def mean_beta1(groups: Sequence[GroupHyperparameters]) -> float:
    """Decay of the first moment, where one number must do for all groups."""
    return fmean(group.beta1 for group in groups)


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """What the global gradient norm says about a step; all 0-D tensors on the gradients' device."""

    factor: Tensor
    """float32; the step's gradients are multiplied by it; NaN if the step is not applied, and then nothing may change."""
    finite: Tensor
    """bool; whether the step is applied: whether the norm's square is finite in float32, as the second moment must be."""
    norm: Tensor
    """float32; norm of the whole gradient, loss scale removed, before clipping."""


def step_scale(sum_of_squares: Tensor, *, max_norm: float, loss_scale: float) -> StepScale:
    """Clips by the norm of the whole gradient, as ``gradient_clip_val`` promises.

    The arithmetic is DeepSpeed's (``DeepSpeedZeroOptimizer.unscale_and_clip_grads``): gradients are divided by
    ``max(1, (norm + 1e-6) / max_norm)``. A norm above 1.8e19 counts as overflow, which is where DeepSpeed sees one in float32 too.

    Args:
        sum_of_squares: 0-D float64, of all gradients of all ranks, loss scale included.
        max_norm: largest norm after clipping; 0 means no clipping.
        loss_scale: factor that the loss was multiplied by before backward.
    """
    norm = (sum_of_squares.sqrt() / loss_scale).float()
    finite = torch.isfinite(sum_of_squares.float())
    divisor = torch.full_like(norm, loss_scale)
    if max_norm > 0:
        divisor = ((norm + 1e-6) / max_norm).clamp_(min=1.0) * loss_scale
    factor = torch.where(finite, 1.0 / divisor, torch.nan)
    return StepScale(factor=factor, finite=finite, norm=norm)
