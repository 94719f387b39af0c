"""How far weights are moved beyond the exact ones, so that a forward pass sees about what AdamW's weights would be. Pure functions.

A window that closes with step t is published d steps later, and the forward passes of steps t + d + 1 to t + d + S see its weights: the
exact ones, w, and their momentum m, of step t. At these passes n = d, ..., d + S - 1 more gradients are known, of which g_i is the
i-th, and AdamW itself would stand at

    w - lr / (sqrt(v) + eps) * (A_n * m + B_(n,1) * g_1 + ... + B_(n,n) * g_n)
    A_n = beta1 + beta1^2 + ... + beta1^n,        B_(n,i) = 1 - beta1^(n - i + 1)

up to the bias corrections and what the new gradients change in v. The publish adds one multiple of m for all of its passes (the
look-ahead), and the stand-in adds one multiple of each gradient when it comes, for all passes after it. The multiples here are the means
of A_n and B_(n,i) over these passes: of all choices the nearest to AdamW in the mean square. With S = 1 each is seen by a single pass,
and nothing but the approximations of v is left between what is trained and AdamW.

That matters for stability more than for the lag itself. A gradient that is only one step late lowers the curvature that an Adam of
beta1 = 0.9 stands from 38 / step size to 1.1 / step size, and to 0.4 / step size with S = 4. See docs/decisions.md.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Literal

from lightning_zenflow.schedule.staggered import UpdateSchedule

_OF_FACTORED = 2.0
"""What makes up for the factored second moment (`provisional`): where few entries of a matrix have most of its gradient, it is larger than
most entries' own, and the stand-in moves less than AdamW would. Measured, see docs/decisions.md."""


@lru_cache
def momentum_steps(schedule: UpdateSchedule, beta1: float) -> float:
    """The mean of A_n, in steps along the momentum.

    Args:
        schedule: S and d.
        beta1: decay of the first moment, 0 <= beta1 < 1.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    return beta1 / (1 - beta1) * fmean(1 - beta1**n for n in range(d, d + s))


@lru_cache
def gradient_steps(schedule: UpdateSchedule, beta1: float, age: int) -> float:
    """The mean of B_(n,i), relative to a whole AdamW step along the gradient.

    Args:
        schedule: S and d.
        beta1: decay of the first moment, 0 <= beta1 < 1.
        age: i, from 1. One that no regular pass sees (after a change of schedule, or before the first publish) has the last one's.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    i = min(age, d + s - 1)
    return fmean(1 - beta1 ** (n - i + 1) for n in range(max(i, d), d + s)) if i > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class StalenessCompensation:
    """What `weight_prediction` and `provisional_scale` mean."""

    weight_prediction: float | Literal["auto"]
    provisional_scale: float | Literal["auto"]

    @property
    def looks_ahead(self) -> bool:
        """Whether published weights ever differ from the exact ones."""
        return self.weight_prediction != 0.0

    @property
    def moves(self) -> bool:
        """Whether the stand-in ever moves weights."""
        return self.provisional_scale != 0.0

    def steps_ahead(self, schedule: UpdateSchedule, beta1: float) -> float:
        """Steps along the momentum by which a round of this schedule is published ahead."""
        if self.weight_prediction != "auto":
            return self.weight_prediction
        return momentum_steps(schedule, beta1)

    def scale(self, schedule: UpdateSchedule, beta1: float, age: int) -> float:
        """Size of the stand-in's move relative to the learning rate, for the `age`-th gradient after the one the weights are exact for."""
        if self.provisional_scale != "auto":
            return self.provisional_scale
        return _OF_FACTORED * gradient_steps(schedule, beta1, age)
