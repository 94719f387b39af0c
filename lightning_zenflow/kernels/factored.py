"""The formula of the provisional update: an approximate step on host-owned weights, overwritten by the next publish.

Without it, host-owned weights would show a gradient up to S + d - 1 steps late. The update is Adam's without momentum and with a factored
second moment, as in Adafactor (arXiv 1804.04235, section 3), which takes one float per row and one per column:

    v_ij = row_i * col_j / mean(col),        w_ij <- w_ij - b * lr * c * g_ij / sqrt(v_ij).

c is the clip coefficient of the *last* step, because this step's norm is not known during backward, over this step's loss scale. Without a
step before it, c is NaN, and nothing changes. Every publish overwrites the weights with exact ones, so errors do not accumulate. The
functions are pure except for the rounding noise, which has a seeded generator.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-30
"""Lower bound of second moments: rows and columns below it have no gradient, so their update is zero for any divisor."""

NOISE_NUMEL = 1 << 16
"""Elements of a tile of noise."""

_NOISE_ALIGNMENT = 4
"""Elements in 16 bytes, which CUDA reads as one word; on every device, so that all draw the same bits."""


class SecondMoment(NamedTuple):
    """The factored second moment of one matrix's gradient; changed in place. A checkpoint has these tensors, in this order."""

    row: Tensor
    """[rows] float32; running mean over columns of the squared, clipped gradient."""
    col: Tensor
    """[columns] float32; running mean over rows."""
    n: Tensor
    """0-D float32; steps in it."""

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> "SecondMoment":
        """The second moment before the first step."""
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in ((rows,), (columns,), ())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """The factors of a provisional update w <- w - b * g * row_scale * col_scale."""

    row_scale: Tensor
    """[rows, 1] float32; includes the learning rate and the factor on the gradient."""
    col_scale: Tensor
    """[1, columns] float32."""
    finite: Tensor
    """0-D bool; if False, the gradient or its factor is not finite: no weight changes."""


class RoundingNoise:
    """Random bits for stochastic rounding: drawn once, read as tiles from random offsets, multiples of 16 bytes.

    Args:
        seed: determines all draws.
        device: that of the weights.

    Attributes:
        offsets: generator of the offsets, whose state a checkpoint has.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        size = (2 * NOISE_NUMEL,)
        bits = torch.randint(0, 1 << 16, size, generator=generator, dtype=torch.int32, device="cpu")
        self._bits = bits.to(device)
        self.offsets = random.Random(seed)

    def draw_tile(self) -> Tensor:
        """[NOISE_NUMEL] int32, each 0 to 65535; repeated by the caller for larger tensors."""
        offset = self.offsets.randrange(0, NOISE_NUMEL, _NOISE_ALIGNMENT)
        return self._bits.narrow(0, offset, NOISE_NUMEL)


def round_stochastically_(target: Tensor, values: Tensor, noise: RoundingNoise) -> None:
    """Converts float32 values to the model's type; to bfloat16 stochastically, with the value as expectation.

    Rounding to nearest would lose all updates below half a unit of bfloat16. float16 is 8 times finer and is rounded to nearest.

    Args:
        target: any shape, model dtype, contiguous.
        values: the same shape, float32, contiguous; overwritten.
        noise: the source of random bits.
    """
    if target.dtype == torch.bfloat16:
        bits = values.view(torch.int32).view(-1)
        random_bits, repeats = noise.draw_tile(), -(-bits.numel() // NOISE_NUMEL)
        if repeats > 1:
            random_bits = random_bits.repeat(repeats)
        # Adding 16 random bits carries into the upper half with probability (lower half) / 65536.
        bits.add_(random_bits.narrow(0, 0, bits.numel())).bitwise_and_(-65536)
    target.copy_(values)
