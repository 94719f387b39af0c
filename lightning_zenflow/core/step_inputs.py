"""Inputs of an AdamW step besides the gradient: hyperparameters, the factor of clipping and loss scale, and the norm that predicts it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class GroupHyperparameters:
    """Hyperparameters of one parameter group in one step, by the names of `torch.optim.AdamW`: all >= 0, `beta1` and `beta2` below 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True for AdamW: the decay acts on the weight. False for Adam: it is added to the gradient."""


class GivenFactor(NamedTuple):
    """What the user's code has multiplied to all gradients of a step, 0-D float32 on the device or the CPU."""

    whole: Tensor
    unscaling: Tensor | None
    """The part of it that takes off a loss scale, as of `torch.amp.GradScaler`; None: there was none. The rest is clipping."""


def read_hyperparameters(optimizer: Optimizer) -> list[GroupHyperparameters]:
    """The current hyperparameters of each parameter group of the user's optimizer, AdamW or Adam of torch or DeepSpeed.

    Only numbers and CPU tensors are read, so that nothing synchronises with a device. ValueError: a value is another one, or out of range.
    """
    result = []
    for index, group in enumerate(optimizer.param_groups):
        numbers = {key: group[key] for key in ("lr", "eps", "weight_decay")}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        for key, value in numbers.items():
            below = 1.0 if key.startswith("beta") else math.inf
            is_read = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
            number = value.item() if is_read else value
            # NaN fails every comparison.
            if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < below:
                must = f"a number >= 0 and < {below:g}, or a CPU tensor of one element with it"
                raise ValueError(f"{place_of(optimizer, index)}{key} must be {must}, got {value!r}")
            numbers[key] = float(number)
        # Since torch 2.7 Adam has it as an option, and AdamW is a subclass of Adam. DeepSpeed's classes have an attribute.
        of_torch = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        decoupled = bool(getattr(optimizer, "adam_w_mode", of_torch))
        result.append(GroupHyperparameters(**numbers, decoupled=decoupled))
    return result


def name_of(kind: type[Optimizer]) -> str:
    """A class as its users import it, such as "torch.optim.AdamW"."""
    return f"{kind.__module__.rpartition('.')[0]}.{kind.__qualname__}"


def place_of(optimizer: Optimizer, index: int) -> str:
    """A parameter group, for the beginning of a message."""
    return f"optimizer {name_of(type(optimizer))}, parameter group {index}: "


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Scale of a step by the global gradient norm; 0-D tensors on the gradients' device."""

    factor: Tensor
    """float32; multiplies the gradients; NaN if the step is skipped, which then changes no state."""
    finite: Tensor
    """bool; whether the step is applied, that is, whether the squared norm is finite in float32, as the second moment must be."""
    norm: Tensor
    """float32; norm of the whole gradient, without loss scale, before clipping."""
    count: Tensor
    """float64; number of applied steps, including this one if it is applied."""

    def coefficients(self, h: GroupHyperparameters) -> tuple[Tensor, Tensor]:
        """AdamW's lr / (1 - beta1^s) and 1 / sqrt(1 - beta2^s), where the step is the s-th applied one; 0-D float64 on the device."""
        steps = self.count.clamp(min=1)
        return h.lr / (1 - h.beta1**steps), (1 - h.beta2**steps).rsqrt()

    def without(self, n_missed: int) -> "StepScale":
        """The scale for elements that have missed some of the applied steps."""
        return replace(self, count=self.count - n_missed) if n_missed else self


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Adds a tensor over a group's ranks, in place; None: there is one rank."""
    if group is not None:
        dist.all_reduce(values, group=group)


def step_scale(sum_of_squares: Tensor, *, max_norm: float, loss_scale: float, count: Tensor) -> StepScale:
    """The scale of a step, by the arithmetic of ``DeepSpeedZeroOptimizer.unscale_and_clip_grads``: gradients are divided by
    ``max(1, (norm + 1e-6) / max_norm)``. A norm above 1.8e19 counts as overflow, as in DeepSpeed with float32.

    The squared norm is that of the gradients of all ranks, with loss scale: 0-D float64, as `count`, the number of steps applied before.
    """
    norm = _norm(sum_of_squares, loss_scale)
    factor = clip_factor(sum_of_squares, max_norm=max_norm, loss_scale=loss_scale)
    finite = ~factor.isnan()
    return StepScale(factor=factor, finite=finite, norm=norm, count=count + finite)


def clip_factor(sum_of_squares: Tensor, *, max_norm: float | Tensor, loss_scale: float | Tensor) -> Tensor:
    """`StepScale.factor` alone, in fewer launches. Limit and loss scale may be on the device too, 0-D float32."""
    # Zero, or NaN where the sum is not finite in float32. Few operations: each block that is submitted in backward has a factor.
    single = sum_of_squares.float()
    gap = single - single
    if _is(max_norm, 0):
        return gap.add_(1.0 / loss_scale)
    divisor = _norm(sum_of_squares, loss_scale).add(1e-6).div_(max_norm).clamp_(min=1.0)
    return (divisor if _is(loss_scale, 1) else divisor.mul_(loss_scale)).reciprocal_().add_(gap)


UNCLIPPED = 1 - 2**-20
"""Smallest clip coefficient of a step without clipping: 1 but for the rounding of the factor."""


def step_word(factor: Tensor, step: int) -> Tensor:
    """``zenflow::StepWord`` of a step, or of a block in it: [4] int32 on the device of the factor, 0-D float32."""
    number = torch.full((1,), step, dtype=torch.int64, device=factor.device).view(torch.int32)
    bits = factor.view(torch.int32).view(1)
    return torch.cat([bits, bits ^ number[:1], number])  # little-endian


def _norm(sum_of_squares: Tensor, loss_scale: float | Tensor) -> Tensor:
    norm = sum_of_squares.sqrt()
    return (norm if _is(loss_scale, 1) else norm / loss_scale).float()


def _is(value: float | Tensor, number: float) -> bool:
    """Whether the host knows that a value is a number."""
    return not isinstance(value, Tensor) and value == number


def _by_type(parts: Sequence[Tensor]) -> list[Tensor]:
    """Concatenates the parts of each type: those of several types a CUDA device copies one by one."""
    of_types = [[part for part in parts if part.dtype == dtype] for dtype in (torch.float32, torch.float64)]
    return [torch.cat(of_type) if len(of_type) > 1 else of_type[0] for of_type in of_types if of_type]


class GradientNorms:
    """Squared norms of a step's gradients, in order of arrival: their sum, which is predicted in backward from its part so far.

    The prediction is the sum up to a block's arrival times its ratio to the whole in the steps before whose norm was finite. It is a
    function of the gradients alone, so that runs repeat; ranks predict from their own parts. Nothing here is read by the host. If
    `speculates`, `word` takes the factor of a step that is not clipped, instead.

    Where the user's code clips, its limit and its loss scale are *learned* from the factors of the steps before. Only a clipped step shows
    the limit; a step above it that is not clipped makes it unknown again, and none is predicted to be clipped then.

    Attributes:
        learns: whether the step is predicted with what has been learned.
        max_norm, loss_scale: of `step_scale`; those that have been learned are 0-D float32 on the device.
        sum: 0-D float64; of what blocks have counted in the step.
        partial: [n_blocks] float64; for each block the sum when it was complete.
        ratio: [n_blocks] float64; of the whole to `partial`; NaN: not known.
        expected: 0-D float64; the whole of the last step with this one's loss scale.
        knows_last: whether there has been a step to predict from.
    """

    def __init__(self, n_blocks: int, device: torch.device, *, speculates: bool = False) -> None:
        self.speculates = speculates
        self._parts: list[Tensor] = []
        self._n_in_sum = 0  # of the parts
        self.sum = torch.zeros((), dtype=torch.float64, device=device)
        self.partial = torch.zeros(n_blocks, dtype=torch.float64, device=device)
        self.ratio = torch.full((n_blocks,), torch.nan, dtype=torch.float64, device=device)
        self._last = torch.zeros((), dtype=torch.float64, device=device)
        self._limit = torch.full((), torch.inf, dtype=torch.float32, device=device)
        self._scale = torch.ones_like(self._limit)
        self.expected = self._last.clone()
        self.knows_last = False

    def open(self, step: int, *, max_norm: float, loss_scale: float) -> None:
        """Begins a step; the norms are those of `step_scale`. Infinity: the user's code clips, to what is learned."""
        self.step, self.learns = step, math.isinf(max_norm) and not self.speculates
        self.max_norm: float | Tensor = max_norm
        self.loss_scale: float | Tensor = loss_scale
        if self.learns:
            # Copies, as below.
            self.max_norm, self.loss_scale = self._limit.clone(), self._scale.clone()
        self._parts.clear()
        self._n_in_sum = 0
        self.sum.zero_()
        self.partial.zero_()
        # In its own memory: backward and the step use different streams.
        torch.mul(self._last, self.loss_scale**2, out=self.expected)

    def add(self, parts: Iterable[Tensor]) -> None:
        """Adds `SquaredNorms.parts` of gradients that have arrived."""
        self._parts += parts

    def whole(self) -> Tensor:
        """Sum of all that has been added in the step: 0-D float64."""
        return sum((parts.sum(dtype=torch.float64) for parts in _by_type(self._parts)), torch.zeros_like(self.sum))

    def take_new(self) -> list[Tensor]:
        """What has been added since the last call in the step: a tensor for each type, float32 or float64. The caller adds it to `sum`."""
        new, self._n_in_sum = self._parts[self._n_in_sum :], len(self._parts)
        return _by_type(new)

    def up_to(self, block: int) -> Tensor:
        """Sum of what has been added when a block is complete: 0-D float64."""
        for parts in self.take_new():
            self.sum.add_(parts.sum(dtype=torch.float64))
        return self.partial[block].copy_(self.sum)

    def predict(self, block: int) -> Tensor:
        """Squared norm of the step's whole gradient, of all ranks and with loss scale: 0-D float64; after `up_to`."""
        partial, ratio = self.partial[block], self.ratio[block]
        # Where the last step had no such part, its norm counts.
        return torch.where(ratio.isnan(), torch.maximum(partial, self.expected), partial * ratio)

    def word(self, block: int) -> Tensor:
        """`step_word` of a block that is complete; its factor, which is predicted, is NaN if any gradient so far is not finite."""
        squared_norm = self.up_to(block)
        if self.speculates:
            squared_norm = squared_norm - squared_norm  # zero, or NaN where the sum is not finite
        elif not _is(self.max_norm, 0):
            squared_norm = self.predict(block)
        return step_word(clip_factor(squared_norm, max_norm=self.max_norm, loss_scale=self.loss_scale), self.step)

    def end_step(
        self, squared_norm: Tensor, scale: StepScale, loss_scale: float | Tensor, unscaling: Tensor | None = None
    ) -> None:
        """Takes the step's own squared norm, 0-D float64, and its scale, of which `GivenFactor.unscaling` may be a part; one that is not
        finite is not predicted from.
        """
        finite = scale.finite
        if self.learns:
            one = torch.ones_like(scale.factor)
            unscaling = one / loss_scale if unscaling is None else one * unscaling
            norm, coefficient = squared_norm.sqrt() * unscaling + 1e-6, scale.factor / unscaling
            limit = torch.where(coefficient < UNCLIPPED, norm * coefficient, self._limit)
            # Rounding makes no other limit.
            limit = torch.where(norm * coefficient > limit * (1 + 1e-5), torch.inf, limit)
            loss_scale = unscaling.reciprocal()
            for learned, of_step in ((self._limit, limit), (self._scale, loss_scale)):
                learned.copy_(torch.where(finite, of_step, learned))
        # Geometric mean of the step's own ratio and of the mean so far.
        latest = torch.where(self.partial > 0, squared_norm / self.partial, torch.nan)
        ratio = torch.where(self.ratio.isnan(), latest, self.ratio.sqrt() * latest.sqrt())
        self.ratio.copy_(torch.where(finite, ratio, self.ratio))
        self._last.copy_(torch.where(finite, squared_norm / loss_scale**2, self._last))
        self.knows_last = True

    def state_dict(self) -> dict[str, Any] | None:
        """What the next step is predicted from, on the CPU; None: nothing yet."""
        if not self.knows_last:
            return None
        return {name: value.cpu() for name, value in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`, for the same blocks."""
        self.knows_last = state is not None
        if state is not None:
            for name, value in self._state.items():
                value.copy_(state.get(name, value))  # earlier checkpoints have no "limit" and "scale"

    @property
    def _state(self) -> dict[str, Tensor]:
        return {"ratio": self.ratio, "last": self._last, "limit": self._limit, "scale": self._scale}
