"""What stands in `parameter.grad` from a backward pass to `zero_grad`: a mark of gradients that have been taken in backward."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves  # private: torch's own way to look at arguments of `__torch_dispatch__`
from typing_extensions import Self

from lightning_zenflow.core.errors import Calls, MisconfigurationException


def _instead(calls: Calls) -> str:
    return (
        f"under {calls.front} gradients are taken in backward: read them with `deepspeed.utils.safe_get_full_grad` {calls.read}; change"
        f" them in backward, with `parameter.register_hook(lambda gradient: ...)`; clip them by `{calls.clip}`; drop those of a whole step"
        " with `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass; for"
        " the gradient of an input, call `torch.autograd.grad(loss, input)`, which leaves weights alone"
    )


class TakenGradient(Tensor):
    """Of the shape and type of a parameter's gradient, with memory for one element; refuses to be read or changed."""

    _calls: Calls

    @staticmethod
    def __new__(cls, parameter: Tensor, calls: Calls) -> Self:
        """The one for parameters of this shape, type and device."""
        # Private: torch's constructor of subclasses that see operations.
        taken: Self = Tensor._make_subclass(cls, parameter.detach().new_zeros(()).expand(parameter.shape))
        taken._calls = calls
        return taken

    # Functions of torch go on to `__torch_dispatch__`; what compiles a module may look at shapes and types.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]  # torch's has no `func`
        """Refuses every operation."""
        (taken, *_) = (t for t in tree_leaves((args, kwargs)) if isinstance(t, cls))
        taken._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MisconfigurationException(
            f"`parameter.grad` must not be used between backward and `zero_grad`: {_instead(self._calls)}"
        )

    # What torch refuses in its own name, or answers without an operation.
    tolist = numpy = storage = map_ = __array__ = __reduce_ex__ = __format__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = _refuse


class TakenGradients:
    """`TakenGradient` in the parameters of a model, as long as torch would have gradients there.

    Args:
        names: of all parameters that are trained.
        calls: the front's, for messages.
    """

    def __init__(self, names: Mapping[Tensor, str], calls: Calls) -> None:
        self._names, self._calls = names, calls
        self._of_shape: dict[torch.Size, TakenGradient] = {}
        self._are_put = False

    def mark(self) -> None:
        """Puts them into the parameters, after a backward pass."""
        # First: who is interrupted below removes what has been put in.
        self._are_put = True
        for p in self._names:
            # Under stage 3 parameters have another shape where they are gathered.
            if p.shape not in self._of_shape:
                self._of_shape[p.shape] = TakenGradient(p, self._calls)
            p.grad = self._of_shape[p.shape]

    def begin_pass(self) -> None:
        """Before a backward pass, which puts gradients there."""
        self.clear()

    def clear(self) -> None:
        """Removes them, before a backward pass and before the parameters are given back."""
        if self._are_put:
            for p in self._names:
                p.grad = None
            # Last: who is interrupted before does it again.
            self._are_put = False

    def are_dropped(self, *, pending: bool) -> bool:
        """Whether the user's code has dropped them, by `module.zero_grad()`; refuses others, and some while a step is `pending`."""
        marked = self._names.items() if self._are_put else ()
        replaced = {name: p.grad for p, name in marked if not isinstance(p.grad, TakenGradient)}
        in_part = 0 < len(replaced) < len(self._names)
        if (pending and in_part) or any(gradient is not None for gradient in replaced.values()):
            raise MisconfigurationException(
                f"{', '.join(replaced)}: `grad` must not be assigned between backward and step: {_instead(self._calls)}"
            )
        return bool(replaced) and not in_part

    def refuse_accumulation(self) -> None:
        """Refuses gradients that were there before a step's first backward pass, to which torch would add."""
        if any(isinstance(p.grad, TakenGradient) for p in self._names):
            raise MisconfigurationException(
                f"`optimizer.zero_grad()` must come before the first backward pass of each step: {self._calls.front} does not keep"
                f" gradients of a step that is done; to accumulate them before it, {self._calls.accumulate}"
            )

    def refuse_second_step(self) -> None:
        """Refuses a step by gradients that a step before has used."""
        if self._are_put:
            raise MisconfigurationException(
                f"{self._calls.front}: a step must have a backward pass of its own, got a second call of `optimizer.step` behind one"
            )
