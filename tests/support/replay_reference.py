"""The worker's AdamW in torch, with the same bits: each operation rounded once to float32, moments rounded as the arena holds them.

`csrc/adamw/replay_adamw.h` has the operations, `csrc/adamw/stochastic_rounding.h` the noise, `csrc/adamw/moments_in_8_bits.h` the codes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters
from zenflow_reference import Gradients, Groups

_MASK = 0xFFFFFFFF


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32 values, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008), after which rounding to float32 is right.
    """
    product, addend = a.double() * _float32(b).double(), _float32(c).double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    towards = torch.copysign(torch.full_like(error, math.inf), error)
    is_even = total.view(torch.int64) & 1 == 0
    # Infinity and NaN have an error of NaN.
    is_cut = (error != 0) & is_even & total.isfinite()
    return torch.where(is_cut, torch.nextafter(total, towards), total).float()


def noise_seed(step: int) -> int:
    """The low half of splitmix64's output for a step."""
    x = step * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) & _MASK


def noise_of(seed: int | Tensor, element: Tensor) -> Tensor:
    """Uniform in 0 to 65535; int64 like `element`, the index in the partition."""
    return _noise(seed, element) >> 16


def other_noise_of(seed: int | Tensor, element: Tensor) -> Tensor:
    """The same, independent of `noise_of`."""
    return _noise(seed, element) & 0xFFFF


def _noise(seed: int | Tensor, element: Tensor) -> Tensor:
    # Products wrap around modulo 2^64, of which the low half counts.
    x = (element * 0x9E3779B1 + seed) & _MASK
    return (x ^ (x >> 15)) * 0x85EBCA77 & _MASK


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Float32 values that bfloat16 has, from float32 ones that are not negative; one of the two neighbours, given uniform noise."""
    bits = values.view(torch.int32).long() + noise
    return torch.where(values.isnan(), values, (bits >> 16 << 16).int().view(torch.float32))


@dataclass(kw_only=True)
class ReplayedAdamW:
    """The arena's state, one tensor a parameter, all float32.

    Args:
        master: initial weights.
        elements: index in the partition of each weight, int64.
        scales: number of the elements that each weight shares its scales with, where moments have 8 bits; None: they have 16.
    """

    master: list[Tensor]
    elements: Sequence[Tensor]
    scales: Sequence[Tensor] | None = None
    exp_avg: list[Tensor] = field(init=False)
    exp_avg_sq: list[Tensor] = field(init=False)
    is_slow: list[bool] = field(init=False)
    """Whether a first moment changes by less than half of bfloat16's spacing in a step."""
    counts: list[int] = field(init=False)
    """For each parameter the steps that were applied to it."""

    def __post_init__(self) -> None:
        # Until a step is applied, weights that are float32 already would else be the caller's own.
        self.master = [w.detach().to(torch.float32, copy=True) for w in self.master]
        self.exp_avg, self.exp_avg_sq = ([torch.zeros_like(w) for w in self.master] for _ in range(2))
        self.is_slow, self.counts = [False] * len(self.master), [0] * len(self.master)

    def step(self, gradients: Gradients, groups: Groups, factor: float) -> None:
        """Applies one gradient and one group a parameter, in 32 bits; nothing, if `factor` is not finite."""
        if not math.isfinite(factor):
            return
        for i, (gradient, h) in enumerate(zip(gradients, groups, strict=True)):
            if gradient is None:
                continue
            w = self.master[i]
            self.counts[i] += 1
            g = gradient.float() * _float32(factor)
            if h.weight_decay and not h.decoupled:
                g = fma(w, h.weight_decay, g)
            m = fma(g, 1 - h.beta1, self.exp_avg[i] * _float32(h.beta1))
            v = fma(g * g, 1 - h.beta2, self.exp_avg_sq[i] * _float32(h.beta2))
            if h.weight_decay and h.decoupled:
                w = fma(w, -h.lr * h.weight_decay, w)
            self.master[i], self.exp_avg[i], self.exp_avg_sq[i] = w, m, v
            self.master[i] = self.predicted(i, h, 1.0)
            self.is_slow[i] = 1 - h.beta1 < 2.0**-8

    def predicted(self, i: int, h: GroupHyperparameters, steps: float) -> Tensor:
        """Weights of a parameter that are so many steps ahead along the momentum."""
        step_size = _float32(-h.lr / (1 - h.beta1 ** self.counts[i]))
        inv_sqrt = 1 / math.sqrt(1 - h.beta2 ** self.counts[i])
        u = self.exp_avg[i] / fma(_root(self.exp_avg_sq[i]), inv_sqrt, h.eps)
        return fma(u, steps * step_size, self.master[i])

    def close_windows(self, closing: Sequence[Tensor], last_step: int) -> None:
        """Rounds the moments, as the worker does at the end of a window.

        Args:
            closing: for each parameter, which elements are in a block whose window ends with `last_step`, bool.
            last_step: counted from 1, skipped ones included.
        """
        seed = noise_seed(last_step)
        for i, (of_parameter, element) in enumerate(zip(closing, self.elements, strict=True)):
            m, v, noise = self.exp_avg[i], self.exp_avg_sq[i], noise_of(seed, element)
            if self.scales is None:
                slow = round_stochastically(m.abs(), other_noise_of(seed, element)).copysign(m)
                rounded = slow if self.is_slow[i] else m.bfloat16().float(), round_stochastically(v, noise)
            else:
                rounded = coded(m, v, self.scales[i], other_noise_of(seed, element), noise)
            self.exp_avg[i], self.exp_avg_sq[i] = map(torch.where, (of_parameter,) * 2, rounded, (m, v))


def coded(
    exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, exp_avg_noise: Tensor, exp_avg_sq_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Both moments after coding in 8 bits; elements with equal numbers in `scales` have one scale. Noise is uniform in 0 to 65535."""
    scale = _largest(exp_avg_sq, scales).clamp(2.0**-100, torch.finfo(torch.float32).max)
    root = _root(exp_avg_sq * (1 / scale)).clamp(_square(torch.tensor(1.0), 255).item(), 1)
    ratio = exp_avg / (root * _root(scale))
    largest = _largest(ratio.abs(), scales).clamp(2.0**-40, 2.0**126)
    c = code_of_square(root * 255**2, 255, exp_avg_sq_noise) * ((exp_avg_sq != 0) | (exp_avg != 0))
    # torch divides a number by a tensor in two operations.
    q = code_of_square(ratio.abs() * (_float32(127**2) / largest), 127, exp_avg_noise)
    with_16_bits = (largest.view(torch.int32) + 128 >> 8 << 8).view(torch.float32)
    # A code of zero has no sign.
    return decoded(torch.copysign(q, ratio) + 0.0, c, with_16_bits, scale)


def decoded(q: Tensor, c: Tensor, ratio_scales: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments that codes stand for, float32; each element with its scales."""
    root = _square(c, 255)
    return torch.copysign(_square(q, 127), q) * ratio_scales * (root * _root(scales)), root**2 * scales


def _square(code: Tensor, n: int) -> Tensor:
    return code * code * (1 / n**2)


def code_of_square(square: Tensor, n: int, noise: Tensor) -> Tensor:
    """Of n^2 times the square."""
    below = _root(square).clamp(max=n - 1).trunc()
    return below + (square - below * below > noise.float() * 2.0**-16 * (2 * below + 1))


def _largest(magnitudes: Tensor, scales: Tensor) -> Tensor:
    """Of all elements with the same number in `scales`."""
    flat, number = magnitudes.reshape(-1), scales.reshape(-1)
    largest = torch.zeros(int(number.max()) + 1).scatter_reduce(0, number, flat, "amax") if len(flat) else flat
    return largest[number].view_as(magnitudes)


def _root(values: Tensor) -> Tensor:
    # torch's vectorised root of float32 is not always rounded right.
    return values.double().sqrt().float()


def _float32(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64).float()
