"""The provisional update: a cheap stand-in that moves host-owned weights at once, until the worker's exact result overwrites it.

Host-owned weights would otherwise stand still for up to S + d steps. What is applied here is Adam's step without its memory: the
momentum is left out, and the second moment is kept in factored form, as in Adafactor (arXiv 1804.04235, section 3): one float a
row and one a column,

    v_ij = row_i * col_j / mean(col),        w_ij <- w_ij - b * lr * c * g_ij / sqrt(v_ij).

c is the *last* step's clip coefficient, because this step's norm is not known during backward. The next publish of a block overwrites its
weights, so errors never accumulate. Pure functions but for the noise, which is drawn from a seeded generator.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SMALLEST = 1e-30
"""Second moments below it belong to rows or columns without any gradient, whose update is zero whatever it is divided by."""

NOISE_NUMEL = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondMoment:
    """Of one matrix's gradient, factored; changed in place."""

    row: Tensor
    """[rows] float32; running mean over columns of the squared, clipped gradient."""
    col: Tensor
    """[columns] float32; running mean over rows."""
    n: Tensor
    """0-D float32; steps in it."""

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> "SecondMoment":
        """Of no step so far."""
        return cls(
            row=torch.zeros(rows, device=device),
            col=torch.zeros(columns, device=device),
            n=torch.zeros((), device=device),
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of it, for a checkpoint."""
        return self.row, self.col, self.n


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """A provisional update but for the gradient and its size b: w <- w - b * g * row_scale * col_scale."""

    row_scale: Tensor
    """[rows, 1] float32; learning rate and factor on the gradient included."""
    col_scale: Tensor
    """[1, columns] float32."""
    finite: Tensor
    """0-D bool; where False nothing moves."""


class RoundingNoise:
    """Random bits for stochastic rounding: one tile drawn once, read from random offsets.

    Args:
        seed: runs with the same seed round alike.
        device: where the weights are.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 1 << 16, (2 * NOISE_NUMEL,), generator=generator, dtype=torch.int32)
        self._bits = bits.to(device)
        self._offsets = random.Random(seed)

    def get_state(self) -> tuple[Any, ...]:
        """The generator's, for a checkpoint."""
        return self._offsets.getstate()

    def set_state(self, state: tuple[Any, ...]) -> None:
        """The inverse of `get_state`."""
        self._offsets.setstate(state)

    def draw_tile(self) -> Tensor:
        """[65536] int32, each 0 to 65535; to be repeated."""
        return self._bits.narrow(0, self._offsets.randrange(NOISE_NUMEL), NOISE_NUMEL)

    def draw_address(self) -> int:
        """Where the tile begins that `draw_tile` would return, for compiled code on the same device."""
        return self._bits.data_ptr() + self._offsets.randrange(NOISE_NUMEL) * self._bits.itemsize

    def draw(self, numel: int) -> Tensor:
        """[numel] int32, each 0 to 65535."""
        repeats = -(-numel // NOISE_NUMEL)
        tile = self.draw_tile()
        return (tile.repeat(repeats) if repeats > 1 else tile).narrow(0, 0, numel)


def round_stochastically_(target: Tensor, values: Tensor, noise: RoundingNoise) -> None:
    """Writes float32 values into a tensor of the model's type; bfloat16 is rounded up or down with the right expectation.

    Without it, updates below half a bfloat16 step would all be lost. float16 has 8 times finer steps and is rounded to nearest.

    Args:
        target: any shape, model dtype, contiguous.
        values: the same shape, float32, contiguous; overwritten.
        noise: where random bits come from.
    """
    if target.dtype == torch.bfloat16:
        bits = values.view(torch.int32).view(-1)
        # Adding 16 random bits carries into the upper half with the probability that the lower half stands for.
        bits.add_(noise.draw(bits.numel())).bitwise_and_(-65536)
    target.copy_(values)


def factored_step_(
    moment: SecondMoment, row_squared_norms: Tensor, col_energy: Tensor, *, beta2: float, lr: float, scale: Tensor
) -> Factors:
    """Takes a step's gradient into its second moment; the same in one pass on a CPU: ``zenflow_factored_step``.

    Args:
        moment: changed in place, but not by a gradient that is not finite.
        row_squared_norms: [rows] float32; this step's sum of squares of each row.
        col_energy: [columns] float32; of each column.
        beta2: decay per step.
        lr: learning rate.
        scale: 0-D float32; factor on the gradient.

    Returns:
        What the gradient is multiplied by: lr * scale / sqrt(v_ij), bias-corrected.
    """
    # The sum in float32, as everything that follows: squares overflow there that float64 still holds.
    finite = torch.isfinite(col_energy.sum())
    weight = (1 - beta2) * finite
    squared = scale.square()
    row, col = moment.row, moment.col
    row.lerp_(torch.where(finite, row_squared_norms * (squared / col.numel()), 0.0), weight)
    col.lerp_(torch.where(finite, col_energy * (squared / row.numel()), 0.0), weight)
    moment.n.add_(finite)
    bias_correction = 1 - beta2 ** moment.n.clamp(min=1)
    row_scale = row.clamp(min=_SMALLEST).rsqrt_().mul_((col.mean() * bias_correction).sqrt()).mul_(scale * lr)
    col_scale = col.clamp(min=_SMALLEST).rsqrt_()
    return Factors(row_scale=row_scale.unsqueeze(1), col_scale=col_scale.unsqueeze(0), finite=finite)


def provisional_values(
    weights: Tensor, gradient: Tensor, row_scale: Tensor, col_scale: Tensor, *, finite: Tensor
) -> Tensor:
    """The weights after the stand-in update.

    Args:
        weights: [rows, columns], model dtype.
        gradient: [rows, columns], model dtype.
        row_scale: [rows, 1] float32; times the step size b * lr * factor on the gradient.
        col_scale: [1, columns] float32.
        finite: 0-D bool; where False the weights come back as they are.

    Returns:
        [rows, columns] float32.
    """
    update = gradient.float() * row_scale
    update.mul_(col_scale)
    return torch.sub(weights.float(), torch.where(finite, update, 0.0), out=update)
