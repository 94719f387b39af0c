"""What stands in `parameter.grad` between backward and step, in the place of gradients that have been taken in backward."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException

_INSTEAD = (
    "under ZenFlowStrategy gradients are taken in backward: read them with `deepspeed.utils.safe_get_full_grad` in"
    " `on_before_optimizer_step`; change them in backward, with `parameter.register_hook(lambda gradient: ...)`; clip them by"
    " `Trainer(gradient_clip_val=...)` or `fabric.clip_gradients(max_norm=...)`; drop those of a whole step with"
    " `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass"
)


class TakenGradient(Tensor):
    """Zeros of a parameter's shape that take no memory. Whatever reads or changes them raises `MisconfigurationException`."""

    @classmethod
    @override
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise MisconfigurationException(f"`parameter.grad` must not be used between backward and step: {_INSTEAD}")


class TakenGradients:
    """`TakenGradient` in the parameters of a model, as long as their gradients are there and have not been applied.

    Args:
        parameters: all that are trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._of_shape: dict[torch.Size, Tensor] = {}
        self._marks: list[Tensor] = []

    def mark(self) -> None:
        """Puts them into the parameters, after a backward pass."""
        for p in self._parameters:
            if p.shape not in self._of_shape:
                self._of_shape[p.shape] = p.detach().new_zeros(()).expand(p.shape).as_subclass(TakenGradient)
        self._marks = [self._of_shape[p.shape] for p in self._parameters]
        for p, mark in zip(self._parameters, self._marks, strict=True):
            p.grad = mark

    def replaced(self) -> list[Tensor]:
        """Parameters whose `grad` has been assigned since `mark`."""
        return [p for p, mark in zip(self._parameters, self._marks, strict=False) if p.grad is not mark]

    def clear(self) -> None:
        """Removes them, before a backward pass and before the parameters are given back."""
        if self._marks:
            for p in self._parameters:
                p.grad = None
            # Last: who is interrupted before does it again.
            self._marks = []


def refuse_replaced(names: Sequence[str]) -> None:
    """Refuses gradients that were assigned between backward and step, by the names of their parameters."""
    raise MisconfigurationException(
        f"{', '.join(names)}: `grad` must not be assigned between backward and step: {_INSTEAD}"
    )
