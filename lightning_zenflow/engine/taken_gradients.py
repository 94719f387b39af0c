"""What stands in `parameter.grad` from a backward pass to `zero_grad`, in the place of gradients that have been taken in backward."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_zenflow.core.errors import MisconfigurationException

_INSTEAD = (
    "under ZenFlowStrategy gradients are taken in backward: read them with `deepspeed.utils.safe_get_full_grad` in"
    " `on_before_optimizer_step`; change them in backward, with `parameter.register_hook(lambda gradient: ...)`; clip them by"
    " `Trainer(gradient_clip_val=...)` or `fabric.clip_gradients(max_norm=...)`; drop those of a whole step with"
    " `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass"
)


class TakenGradient(Tensor):
    """Has the shape and type of a parameter's gradient, and memory for one element. Whatever reads or changes elements of it raises
    `MisconfigurationException`.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Self:
        """The one for parameters of this shape, type and device."""
        # Private: torch's constructor of subclasses that see operations.
        taken: Self = Tensor._make_subclass(cls, parameter.detach().new_zeros(()).expand(parameter.shape))
        return taken

    # Functions of torch go on to `__torch_dispatch__`; what compiles a module may look at shapes and types.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> NoReturn:
        """Refuses every operation."""
        raise MisconfigurationException(
            f"`parameter.grad` must not be used between backward and `zero_grad`: {_INSTEAD}"
        )


class TakenGradients:
    """`TakenGradient` in the parameters of a model, as long as torch would have gradients there.

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
                self._of_shape[p.shape] = TakenGradient(p)
        self._marks = [self._of_shape[p.shape] for p in self._parameters]
        for p, mark in zip(self._parameters, self._marks, strict=True):
            p.grad = mark

    def show(self) -> None:
        """Ends `hide`."""
        if self._marks:
            # Under stage 3 parameters have another shape where they are gathered.
            self.mark()

    def hide(self) -> None:
        """Takes them out of the parameters in a forward pass, in which there may be a backward pass of the user's own."""
        if self._marks:
            for p in self._parameters:
                p.grad = None

    def clear(self) -> None:
        """Removes them, before a backward pass and before the parameters are given back."""
        self.hide()
        # Last: who is interrupted before does it again.
        self._marks = []

    def replaced(self) -> list[Tensor]:
        """Parameters whose `grad` has been assigned since `mark`."""
        return [p for p, mark in zip(self._parameters, self._marks, strict=False) if p.grad is not mark]

    def refuse_accumulation(self) -> None:
        """Refuses gradients that were there before a step's first backward pass, to which torch would add."""
        if any(p.grad is mark for p, mark in zip(self._parameters, self._marks, strict=False)):
            raise MisconfigurationException(
                "`optimizer_zero_grad` must call `optimizer.zero_grad()` before the backward pass of each step: ZenFlowStrategy does not"
                " keep gradients of a step that is done; accumulate them with `Trainer(accumulate_grad_batches=...)`"
            )

    def refuse_second_step(self) -> None:
        """Refuses a step by gradients that a step before has used."""
        if self._marks:
            raise MisconfigurationException(
                "ZenFlowStrategy: a step must have a backward pass of its own, got a second call of `optimizer.step` behind one"
            )


def refuse_replaced(names: Sequence[str]) -> None:
    """Refuses gradients that were assigned between backward and step, by the names of their parameters."""
    raise MisconfigurationException(
        f"{', '.join(names)}: `grad` must not be assigned between backward and step: {_INSTEAD}"
    )
