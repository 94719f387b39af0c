"""Optimizers of the methods: torch's AdamW, and optimizers that apply gradients late, as asynchronous pipelines do.

Delay as in the literature: the step that leads from w_t to w_(t+1) has the gradient that was computed at w_(t-d). Masters and moments are
in 32 bits and the model in its own type, as for every other method of the comparison.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from typing_extensions import override

MakeOptimizer = Callable[[Module, float, float], Optimizer]
"""An optimizer from a module, learning rate and weight decay."""

MakeRule = Callable[[Sequence[Tensor]], list[Optimizer]]
"""Optimizers of torch from their 32-bit weights; the learning rate is set in every step."""


def adamw(module: Module, lr: float, weight_decay: float) -> Optimizer:
    """torch's AdamW for all parameters."""
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=weight_decay)


class DelayedOptimizer(Optimizer):
    """Applies each gradient `delay` steps late.

    Args:
        params: weights, in the model's type.
        lr: learning rate.
        rule: the update without delay.
        delays: steps, for each parameter.
        error_feedback: show the weights moved on by `delay` more of the last update; see `methods.METHODS`.
        max_norm: the norm of the whole gradient after clipping; gradients are clipped when they arrive.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float,
        *,
        rule: MakeRule,
        delays: Sequence[int],
        error_feedback: bool = False,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._shown = list(params)
        self._masters = [p.detach().float().clone() for p in params]
        self.rules = rule(self._masters)
        """The optimizers of the masters."""
        self._delays = delays
        self._error_feedback = error_feedback
        self._max_norm = max_norm
        self._waiting: list[deque[Tensor]] = [deque() for _ in self._shown]

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch overloads it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.rules:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
        for shown, master in zip(self._shown, self._masters, strict=True):
            master.grad = torch.zeros_like(master) if shown.grad is None else shown.grad.float()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        clip_grads_with_norm_(self._masters, self._max_norm, get_total_norm(gradients))
        before = [master.clone() for master in self._masters] if self._error_feedback else self._masters
        for master, delay, waiting in zip(self._masters, self._delays, self._waiting, strict=True):
            assert master.grad is not None
            waiting.append(master.grad)
            master.grad = waiting.popleft() if len(waiting) > delay else None
        for optimizer in self.rules:
            optimizer.step()
        for shown, master, old, delay in zip(self._shown, self._masters, before, self._delays, strict=True):
            shown.copy_(master + delay * (master - old) if self._error_feedback else master)
        return loss


def delays_by_stage(module: Module, n_stages: int) -> list[int]:
    """Delays of a pipeline whose stages update as soon as their gradient arrives: n_stages - 1 steps in the first stage, 0 in the last.

    Args:
        module: its parameters come in the order of the forward pass.
        n_stages: stages with equal numbers of parameter tensors.

    Returns:
        A delay for each parameter.
    """
    n = len(list(module.parameters()))
    return [n_stages - 1 - index * n_stages // n for index in range(n)]
