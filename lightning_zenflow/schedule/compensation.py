"""Compensation of staleness: how far weights are moved beyond the exact ones, so that a forward pass sees nearly AdamW's. Pure functions.

A window that closes with step t is published d steps later. The forward passes of steps t + d + 1 to t + d + S see its weights: the exact
weights w and momentum m of step t. At these passes n = d, ..., d + S - 1 newer gradients g_1, ..., g_n exist, and AdamW would have

    w - lr / (sqrt(v) + eps) * (A_n * m + B_(n,1) * g_1 + ... + B_(n,n) * g_n)
    A_n = beta1 + beta1^2 + ... + beta1^n,        B_(n,i) = 1 - beta1^(n - i + 1)

up to the bias corrections and the change of v. Weight prediction adds one multiple of m when the weights are published, for all their
passes. A provisional update adds one multiple of each gradient when it arrives, for all passes after it. The multiples are the means of
A_n and B_(n,i) over these passes, which minimise the mean square distance from AdamW. With S = 1 each is seen by a single pass,
and only the approximations of v remain.

This matters for stability more than for the lag itself. A gradient that is one step late lowers the largest stable curvature of Adam with
beta1 = 0.9 from 38 / step size to 1.0 / step size, and to 0.4 / step size with S = 4. See docs/decisions.md.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Literal

from lightning_zenflow.schedule.staggered import UpdateSchedule

_FACTORED_CORRECTION = 2.0
"""Corrects for the factored second moment (`lightning_zenflow.kernels.factored`): where few entries hold most of a matrix's gradient, it
exceeds the true second moment of most entries, and provisional updates are too small. Measured, see docs/decisions.md."""


@lru_cache
def momentum_steps(schedule: UpdateSchedule, beta1: float) -> float:
    """Mean of A_n, in steps along the momentum.

    Args:
        schedule: S and d.
        beta1: decay of the first moment, 0 <= beta1 < 1.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    return beta1 / (1 - beta1) * fmean(1 - beta1**n for n in range(d, d + s))


@lru_cache
def gradient_steps(schedule: UpdateSchedule, beta1: float, age: int) -> float:
    """Mean of B_(n,i), relative to a whole AdamW step along the gradient.

    Args:
        schedule: S and d.
        beta1: decay of the first moment, 0 <= beta1 < 1.
        age: i, from 1. An i that no regular pass sees (after a change of schedule, or before the first publish) counts as the largest one.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    i = min(age, d + s - 1)
    return fmean(1 - beta1 ** (n - i + 1) for n in range(max(i, d), d + s)) if i > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class StalenessCompensation:
    """Multiples of momentum and gradients for the configured `weight_prediction` and `provisional_scale`."""

    weight_prediction: float | Literal["auto"]
    provisional_scale: float | Literal["auto"]

    @property
    def predicts_weights(self) -> bool:
        """Whether published weights may differ from the exact ones."""
        return self.weight_prediction != 0.0

    @property
    def updates_provisionally(self) -> bool:
        """Whether weights get provisional updates."""
        return self.provisional_scale != 0.0

    def prediction_steps(self, schedule: UpdateSchedule, beta1: float) -> float:
        """Steps along the momentum that are added to published weights."""
        return momentum_steps(schedule, beta1) if self.weight_prediction == "auto" else self.weight_prediction

    def scale(self, schedule: UpdateSchedule, beta1: float, age: int) -> float:
        """Size of the provisional update relative to the learning rate, for the `age`-th gradient since the exact weights."""
        if self.provisional_scale != "auto":
            return self.provisional_scale
        return _FACTORED_CORRECTION * gradient_steps(schedule, beta1, age)
