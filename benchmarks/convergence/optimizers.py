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

Rule = Callable[[Sequence[Tensor], float], Optimizer]
"""An optimizer of torch from its 32-bit weights and a weight decay; the learning rate is set in every step."""


def adamw(module: Module, lr: float, weight_decay: float) -> Optimizer:
    """torch's AdamW for all parameters."""
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=weight_decay)


class DelayedOptimizer(Optimizer):
    """Applies each gradient `delay` steps late.

    Args:
        params: weights, in the model's type.
        lr: learning rate.
        rule: the update without delay.
        delay: steps.
        error_feedback: show the weights moved on by `delay` more of the last update; see `methods.METHODS`.
        max_norm: the norm of the whole gradient after clipping; gradients are clipped when they arrive.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float,
        *,
        rule: Callable[[Sequence[Tensor]], Optimizer],
        delay: int,
        error_feedback: bool = False,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._shown = list(params)
        self._masters = [p.detach().float().clone() for p in params]
        self._rule = rule(self._masters)
        self._delay = delay
        self._error_feedback = error_feedback
        self._max_norm = max_norm
        self._waiting: deque[list[Tensor]] = deque()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._rule.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for shown, master in zip(self._shown, self._masters, strict=True):
            master.grad = torch.zeros_like(master) if shown.grad is None else shown.grad.float()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        clip_grads_with_norm_(self._masters, self._max_norm, get_total_norm(gradients))
        before = [master.clone() for master in self._masters] if self._error_feedback else self._masters
        self._waiting.append(gradients)
        if len(self._waiting) > self._delay:
            for master, gradient in zip(self._masters, self._waiting.popleft(), strict=True):
                master.grad = gradient
            self._rule.step()
        for shown, master, old in zip(self._shown, self._masters, before, strict=True):
            shown.copy_(master + self._delay * (master - old) if self._error_feedback else master)
        return loss
