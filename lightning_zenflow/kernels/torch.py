"""The passes by torch's operations, on any device."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Kernels, SquaredNorms
from lightning_zenflow.kernels.factored import Factors, RoundingNoise, provisional_values, round_stochastically_


class TorchKernels(Kernels):
    """The passes by torch's operations.

    AdamW's order of operations is that of the worker's replay kernel and of DeepSpeedCPUAdam. torch fuses other pairs of operations than
    the kernel, so the two agree to a few units in the last place, not bit for bit.
    """

    @override
    def squared_norms(self, gradient: Tensor, *, per_axis: bool) -> SquaredNorms:
        # The total is the sum of the rows' in float64: torch's float32 sums over long vectors are off by 1e-5.
        rows = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)
        parts = rows.double().square().sum(0, keepdim=True)
        if not per_axis:
            return SquaredNorms(parts=parts, row_parts=None, column_parts=None)
        columns = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=torch.float32)
        return SquaredNorms(parts=parts, row_parts=rows.square_().unsqueeze(0), column_parts=columns.square_())

    @override
    def provisional_update_(
        self, weights: Tensor, gradient: Tensor, factors: Factors, noise: RoundingNoise, *, size: float = 1.0
    ) -> None:
        values = provisional_values(weights, gradient, factors, size=size)
        round_stochastically_(weights, values, noise)

    @override
    def adamw_(
        self, state: Tensor, gradient: Tensor, weights: Tensor, h: GroupHyperparameters, scale: StepScale
    ) -> None:
        (master, exp_avg, exp_avg_sq), finite = state, scale.finite
        one = torch.ones_like(scale.count)
        coefficients = scale.coefficients(h)
        g = torch.where(finite, gradient.float() * scale.factor, 0.0)
        if h.weight_decay != 0 and not h.decoupled:
            g = torch.where(finite, torch.add(g, master, alpha=h.weight_decay), 0.0)
        exp_avg.mul_(torch.where(finite, one * h.beta1, one)).add_(g, alpha=1 - h.beta1)
        exp_avg_sq.mul_(torch.where(finite, one * h.beta2, one)).addcmul_(g, g, value=1 - h.beta2)
        denominator = exp_avg_sq.sqrt().mul_(coefficients.inv_sqrt_bias_correction2).add_(h.eps)
        update = torch.div(exp_avg, denominator, out=denominator)
        if h.weight_decay != 0 and h.decoupled:
            master.mul_(torch.where(finite, one * (1 - h.lr * h.weight_decay), one))
        master.sub_(torch.where(finite, update.mul_(coefficients.step_size), 0.0))
        weights.copy_(master)
