"""Inputs of an AdamW step besides the gradient: hyperparameters, and the factor of clipping and loss scale. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroupHyperparameters:
    """Hyperparameters of one parameter group in one step; a scheduler may change any of them at any step."""

    lr: float
    """Learning rate, >= 0."""
    beta1: float
    """Decay of the first moment, 0 <= beta1 < 1."""
    beta2: float
    """Decay of the second moment, 0 <= beta2 < 1."""
    eps: float
    """Added to the square root of the second moment, >= 0."""
    weight_decay: float
    """Coefficient of the weight decay, >= 0."""
    decoupled: bool
    """True for AdamW: the decay acts on the weight. False for Adam: it is added to the gradient."""


def mean_beta1(groups: Sequence[GroupHyperparameters]) -> float:
    """Mean decay of the first moment over parameter groups."""
    return fmean(group.beta1 for group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamwCoefficients:
    """Bias corrections of one step of AdamW, its s-th applied one; 0-D float64 on the gradients' device."""

    step_size: Tensor
    """lr / (1 - beta1^s)"""
    inv_sqrt_bias_correction2: Tensor
    """1 / sqrt(1 - beta2^s)"""


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Scale of a step by the global gradient norm; 0-D tensors on the gradients' device, so that the host never waits for them."""

    factor: Tensor
    """float32; multiplies the gradients; NaN if the step is skipped, which then changes no state."""
    finite: Tensor
    """bool; whether the step is applied, that is, whether the squared norm is finite in float32, as the second moment must be."""
    norm: Tensor
    """float32; norm of the whole gradient, without loss scale, before clipping."""
    count: Tensor
    """float64; number of applied steps, including this one if it is applied."""
    _coefficients: dict[GroupHyperparameters, AdamwCoefficients] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def coefficients(self, h: GroupHyperparameters) -> AdamwCoefficients:
        """Coefficients of a parameter group; computed once, because each of them is a launch and many blocks share them."""
        known = self._coefficients.get(h)
        if known is None:
            steps = self.count.clamp(min=1)
            known = self._coefficients[h] = AdamwCoefficients(
                step_size=h.lr / (1 - h.beta1**steps), inv_sqrt_bias_correction2=(1 - h.beta2**steps).rsqrt()
            )
        return known


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Squared norm of several gradients: 0-D float64.

    Args:
        parts: float32 or float64 [n] each, sums of squares of parts of the gradients; at least one.
    """
    return torch.cat(list(parts)).sum(dtype=torch.float64)


def predicted_squared_norm(partial: Tensor, ratio: Tensor, last: Tensor) -> Tensor:
    """Predicts the squared norm of a step's whole gradient from the part of it that has arrived.

    The part is taken to be the same share of the whole as in the steps before. Where the last step had no such part, its norm counts.

    Args:
        partial: 0-D float64; sum of squares so far. The result is not finite if it is not.
        ratio: 0-D float64; whole over part, result of `smoothed_ratio`.
        last: 0-D float64; the whole squared norm of the last step whose norm was finite.
    """
    return torch.where(ratio.isnan(), torch.maximum(partial, last), partial * ratio)


def smoothed_ratio(ratio: Tensor, whole: Tensor, partial: Tensor) -> Tensor:
    """Geometric mean of whole over part in a step and of this mean before it, so that a step counts half as much as the next.

    Args:
        ratio: float64 [n]; the mean before; NaN where the step before had no such part.
        whole: 0-D float64; the step's squared norm.
        partial: float64 [n]; parts of it.

    Returns:
        float64 [n]; NaN where a part is zero.
    """
    latest = torch.where(partial > 0, whole / partial, torch.nan)
    return torch.where(ratio.isnan(), latest, ratio.sqrt() * latest.sqrt())


def step_scale(sum_of_squares: Tensor, *, max_norm: float, loss_scale: float, count: Tensor) -> StepScale:
    """Computes the factor of clipping by the global norm (``gradient_clip_val``) and of the loss scale.

    The arithmetic is that of ``DeepSpeedZeroOptimizer.unscale_and_clip_grads``: gradients are divided by
    ``max(1, (norm + 1e-6) / max_norm)``. A norm above 1.8e19 counts as overflow, as in DeepSpeed with float32.

    Args:
        sum_of_squares: 0-D float64; squared norm of the gradients of all ranks, with loss scale.
        max_norm: largest norm after clipping; 0 for no clipping.
        loss_scale: factor of the loss in backward.
        count: 0-D float64; number of steps applied before this one.
    """
    norm = _norm(sum_of_squares, loss_scale)
    factor = clip_factor(sum_of_squares, max_norm=max_norm, loss_scale=loss_scale, norm=norm)
    finite = ~factor.isnan()
    return StepScale(factor=factor, finite=finite, norm=norm, count=count + finite)


def clip_factor(sum_of_squares: Tensor, *, max_norm: float, loss_scale: float, norm: Tensor | None = None) -> Tensor:
    """`StepScale.factor` of `step_scale` alone, in fewer launches; `norm`: that of `StepScale`, if it is known."""
    # Zero, or NaN where the sum is not finite in float32. Few operations: each block that is submitted in backward has a factor.
    single = sum_of_squares.float()
    gap = single - single
    if max_norm == 0:
        return gap.add_(1.0 / loss_scale)
    norm = _norm(sum_of_squares, loss_scale) if norm is None else norm
    divisor = norm.add(1e-6).div_(max_norm).clamp_(min=1.0)
    return (divisor if loss_scale == 1 else divisor.mul_(loss_scale)).reciprocal_().add_(gap)


def _norm(sum_of_squares: Tensor, loss_scale: float) -> Tensor:
    norm = sum_of_squares.sqrt()
    return (norm if loss_scale == 1 else norm / loss_scale).float()
