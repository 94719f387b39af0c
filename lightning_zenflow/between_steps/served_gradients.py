"""What stands in `parameter.grad` from a gradient's arrival to the step, where torch's own code clips and reads gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_leaves,
    tree_map,
)  # private: torch's own way to look at arguments of `__torch_dispatch__`
from typing_extensions import Self, override

from lightning_zenflow.core.errors import Calls, MisconfigurationException, kept_gradients, second_step
from lightning_zenflow.core.shards import as_shard, local_part
from lightning_zenflow.core.step_inputs import GivenFactor

_aten = torch.ops.aten


class GradientSource(Protocol):
    """Where the gradients of the present step are, by the number of their slice."""

    def add_gradient(self, slice_index: int, gradient: Tensor) -> None:
        """Receives the gradient of a further micro-batch, which autograd adds to the parameter's."""

    def gradient_norm_of(self, slice_index: int) -> Tensor:
        """Norm of a slice's gradient: 0-D float32 on the device."""

    def copy_gradient(self, slice_index: int) -> Tensor:
        """A copy of a slice's gradient: [slice.numel], model dtype, on the device. Waits for the device."""


class ServedGradient(Tensor):
    """A gradient whose memory is elsewhere: of the shape, type and device of its parameter's.

    Norms of order 2 are those that were taken at the gradient's arrival. A product with one number is recorded, and must be put on all
    gradients of the optimizer: these two are `torch.nn.utils.clip_grad_norm_`, and with a test for infinities `torch.amp.GradScaler`.
    Autograd adds the gradient of a further micro-batch. Every other operation that reads it has a copy; those that write it are refused.
    """

    _owner: "ServedGradients"
    _index: int

    @staticmethod
    def __new__(cls, like: Tensor, owner: "ServedGradients", index: int) -> Self:
        """The one of a parameter or its local shard, `like`, whose slice has this number."""
        # Private: torch's constructor of tensors without memory that see operations.
        served: Self = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        served._owner, served._index = owner, index
        return served

    # Functions of torch go on to `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no `cls`
        """Serves one operation."""
        operation, kwargs = func.overloadpacket, kwargs or {}
        first = args[0]
        served = list(first) if isinstance(first, Sequence) else [first]
        ours = all(isinstance(gradient, cls) for gradient in served)
        if operation in (_aten.detach, _aten.alias) and ours:
            return first
        if operation is _aten.add_ and ours and not kwargs:
            first._owner.source.add_gradient(first._index, args[1])
            return first
        if operation in (_aten.linalg_vector_norm, _aten.norm) and ours and _is_whole_norm(args[1:], kwargs):
            return first._owner.norm(first._index)
        if operation is _aten._foreach_norm and _is_whole_norm(args[1:], kwargs):
            return [g._owner.norm(g._index) if isinstance(g, cls) else torch.linalg.vector_norm(g) for g in served]
        if operation in (_aten.mul_, _aten._foreach_mul_, _aten.div_, _aten._foreach_div_):
            inverse = operation in (_aten.div_, _aten._foreach_div_)
            factors = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(served)
            for gradient, factor in zip(served, factors, strict=True):
                if isinstance(gradient, cls):
                    gradient._owner.scale(gradient._index, factor, inverse=inverse)
                else:  # of another optimizer, or an empty shard
                    (gradient.div_ if inverse else gradient.mul_)(factor)
            return first if operation in (_aten.mul_, _aten.div_) else None
        if operation is _aten._amp_foreach_non_finite_check_and_unscale_:
            _, found_inf, inverse_scale = args
            func([g for g in served if not isinstance(g, cls)], found_inf, inverse_scale)
            for gradient in (g for g in served if isinstance(g, cls)):
                is_infinite = ~gradient._owner.norm(gradient._index).isfinite()
                found_inf.copy_(torch.maximum(found_inf, is_infinite.to(found_inf)))
                gradient._owner.scale(gradient._index, inverse_scale, unscales=True)
            return None
        if func._schema.is_mutable:
            (some, *_) = (g for g in tree_leaves((args, kwargs)) if isinstance(g, cls))
            raise some._owner.error(f"`{func}` would change it")
        args, kwargs = tree_map(lambda value: value.read() if isinstance(value, cls) else value, (args, kwargs))
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """A copy, of the parameter's shape, with what has been multiplied to it. Waits for the device."""
        return self._owner.read(self._index).view(self.shape)

    # What torch answers without an operation.
    @override
    def tolist(self) -> Any:
        return self.read().tolist()

    @override
    def numpy(self, *, force: bool = False) -> Any:
        return self.read().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has keywords of its own
        return f"gradient of shape {list(self.shape)}, taken in backward"


def _is_whole_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments behind the tensors ask for the norm of order 2 of all elements, in float32 or the tensor's type."""
    order = args[0] if args else kwargs.get("ord", kwargs.get("p", 2))
    return isinstance(order, int | float) and float(order) == 2.0 and len(args) < 2 and not kwargs.get("dim")


class ServedGradients:
    """`ServedGradient` in the parameters of a model, of a DTensor as its local shard, and the factors that the user's code has put on all.

    Args:
        names: of all parameters that are trained.
        slice_of: for each parameter of which this rank has a part, the number of its slice.
        source: where the gradients are.
        calls: the front's, for messages.
    """

    def __init__(
        self, names: Mapping[Tensor, str], slice_of: Mapping[Tensor, int], source: GradientSource, calls: Calls
    ) -> None:
        self.source = source
        self._names, self._calls = names, calls
        self._slice_of = slice_of
        self._of_parameter = {
            p: as_shard(ServedGradient(local_part(p), self, index), p) for p, index in slice_of.items()
        }
        self._put: dict[Tensor, None] = {}
        self._norms = dict[int, Tensor]()
        self._factors: list[tuple[Tensor, set[int]]] = []
        self._given: list[tuple[Tensor, bool]] = []  # for each factor what it was made of, and whether it divides
        self._unscaling: Tensor | None = None
        self._is_used = False

    def put(self, parameter: Tensor) -> None:
        """Puts the stand-in into a parameter whose gradient has been received."""
        self._put[parameter] = None
        parameter.grad = self._of_parameter[parameter]

    def stands_in(self, parameter: Tensor) -> bool:
        """Whether `grad` of a parameter is the stand-in."""
        return parameter.grad is not None and parameter.grad is self._of_parameter.get(parameter)

    def begin_pass(self) -> None:
        """Before a backward pass: autograd adds to what is there.

        Raises:
            MisconfigurationException: gradients have been scaled already.
        """
        if self._factors:
            raise self.error(
                "a backward pass must not add to gradients that have been scaled: scale or clip behind the last one"
            )

    def mark(self) -> None:
        """Behind a backward pass: each gradient has been replaced at its arrival."""

    def clear(self) -> None:
        """Removes the gradients of a step that is dropped, or whose `grad` the user resets."""
        for p in self._put:
            if self.stands_in(p):
                p.grad = None
        self._put.clear()
        self.forget_step()
        self._is_used = False

    def forget_step(self) -> None:
        """Forgets norms and factors, before the gradients of another step."""
        self._norms.clear()
        self._factors.clear()
        self._given.clear()
        self._unscaling = None

    def are_dropped(self, *, pending: bool) -> bool:
        """Whether the user's code has removed them, by `module.zero_grad()`; refuses others, and some while a step is `pending`."""
        replaced = {self._names[p]: p.grad for p in self._put if not self.stands_in(p)}
        in_part = 0 < len(replaced) < len(self._put)
        if (pending and in_part) or any(gradient is not None for gradient in replaced.values()):
            raise self.error(f"`grad` of {', '.join(replaced)} must not be assigned between backward and step")
        return bool(replaced) and not in_part

    def refuse_accumulation(self) -> None:
        """Refuses gradients of the step before, to which torch would add."""
        if self._is_used and any(map(self.stands_in, self._put)):
            raise kept_gradients(self._calls)

    def refuse_second_step(self) -> None:
        """Refuses a step by gradients that a step before has used."""
        if self._is_used:
            raise second_step(self._calls)

    def use(self) -> None:
        """Notes that a step has used the gradients, which are there no longer."""
        self._is_used = True
        self.forget_step()

    def norm(self, slice_index: int) -> Tensor:
        """Norm of a gradient, with what has been multiplied to it: 0-D float32 on the device."""
        self._refuse_used()
        if slice_index not in self._norms:
            self._norms[slice_index] = self.source.gradient_norm_of(slice_index)
        norm = self._norms[slice_index]
        for factor, indices in self._factors:
            if slice_index in indices:
                norm = norm * factor.abs()
        return norm

    def read(self, slice_index: int) -> Tensor:
        """A copy of a gradient, flat, with what has been multiplied to it."""
        self._refuse_used()
        gradient = self.source.copy_gradient(slice_index)
        for factor, indices in self._factors:
            if slice_index in indices:
                gradient = gradient.mul_(factor)
        return gradient

    def scale(self, slice_index: int, factor: Any, *, inverse: bool = False, unscales: bool = False) -> None:
        """Multiplies a gradient by a number, or with `inverse` divides it; `unscales`: which takes off a loss scale.

        Raises:
            MisconfigurationException: it is no number.
        """
        self._refuse_used()
        number = torch.as_tensor(factor, dtype=torch.float32).detach()
        if number.numel() != 1:
            raise self.error("all of it must be multiplied by one number")
        # One object, or one value, stands for one factor on many gradients.
        given = (factor if isinstance(factor, Tensor) else number), inverse
        for of, (_, indices) in zip(self._given, self._factors, strict=True):
            if slice_index not in indices and of[1] == inverse and self._is_same(of[0], given[0]):
                indices.add(slice_index)
                return
        self._given.append(given)
        number = (number.reciprocal() if inverse else number).view(())
        self._factors.append((number, {slice_index}))
        if unscales:
            self._unscaling = number

    def factor(self) -> GivenFactor | None:
        """Product of the factors; None: there is none.

        Raises:
            MisconfigurationException: a factor is on some gradients only.
        """
        all_indices = {self._slice_of[p] for p in self._put}
        product = None
        for factor, indices in self._factors:
            if indices != all_indices:
                raise self.error(
                    "all gradients of the optimizer must be scaled alike: clip all of its parameters together"
                )
            product = factor if product is None else product * factor
        return None if product is None else GivenFactor(product, self._unscaling)

    def error(self, what: str) -> MisconfigurationException:
        """The error for a use of a gradient that cannot be served."""
        return MisconfigurationException(
            f"{self._calls.front}: {what}: gradients are taken in backward; read them {self._calls.read}; change them in backward, with"
            " `parameter.register_hook(lambda gradient: ...)`; clip them all by `torch.nn.utils.clip_grad_norm_`; drop those of a whole"
            " step with `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the"
            " forward pass"
        )

    def _refuse_used(self) -> None:
        if self._is_used:
            raise self.error("`parameter.grad` must be used before `optimizer.step()`, got a use behind it")

    @staticmethod
    def _is_same(one: Tensor, other: Tensor) -> bool:
        """Whether two factors are one: the same memory; on the CPU, where that waits for nothing, the same number."""
        if one.data_ptr() == other.data_ptr():
            return True
        return one.device.type == other.device.type == "cpu" and bool(one == other)
