"""What stands in `parameter.grad` from a backward pass to the step, and what the user's code, torch's own too, has asked of it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_leaves,
    tree_map,
)  # private: torch's own way to look at arguments of `__torch_dispatch__`
from typing_extensions import Self, override

from lightning_zenflow.core.step_inputs import GivenFactor, clip_factor

if TYPE_CHECKING:
    from lightning_zenflow.between_steps.uses import ServedGradients

_aten = torch.ops.aten


class StepGradients:
    """The gradients of the step that is next, as the user's code reads and scales them: those of the parameters `names`, of a loss that was
    multiplied by `loss_scale`. Reads are without it.

    Attributes:
        factors: what the user's code has multiplied, each with the names of its gradients, what it was made of, and whether that divides.
    """

    def __init__(self, served: "ServedGradients", names: Iterable[str], loss_scale: float) -> None:
        self._served, self._names, self._loss_scale, self.error = served, {*names}, loss_scale, served.error
        self.factors: list[tuple[Tensor, set[str], Tensor, bool]] = []
        self._unscaling: Tensor | None = None

    def norm(self, name: str) -> Tensor:
        """Norm of a gradient, as it is read: 0-D float32 on the device. The first call is a collective."""
        return self._as_read(self._norms[name].clone(), name).abs()

    def read(self, name: str) -> Tensor:
        """A copy of a gradient, with what has been multiplied to it: of the parameter's shape, type and device. A collective."""
        state = self._served.state
        return self._as_read(state.gradient(name), name).to(state.parameters[name].dtype)

    def _as_read(self, value: Tensor, name: str) -> Tensor:
        """Multiplies what has been multiplied to a gradient, in place."""
        value.div_(self._loss_scale)
        if (max_norm := self._served.max_norm) is not None:
            squares = torch.stack(list(self._norms.values())).double().div_(self._loss_scale).square_()
            value.mul_(clip_factor(squares.sum(), max_norm=max_norm, loss_scale=1.0))
        for factor, names, *_ in self.factors:
            if name in names:
                value.mul_(factor)
        return value

    @cached_property
    def _norms(self) -> dict[str, Tensor]:
        return self._served.state.gradient_norms()

    def scale(self, name: str, factor: Any, *, inverse: bool = False, unscales: bool = False) -> None:
        """Multiplies a gradient by a number, or with `inverse` divides it; `unscales`: which takes off a loss scale.
        MisconfigurationException: it is no number, or cannot be followed.
        """
        number = torch.as_tensor(factor, dtype=torch.float32).detach()
        if number.numel() != 1:
            raise self.error("all of it must be multiplied by one number")
        if not self._served.follows_factors:
            raise self.error(
                "`parameter.grad` must not be scaled where weights are late or shown with a predicted factor, unless update_interval=1,"
                " publish_lag=0 and clip_prediction=False"
            )
        # One object, or one value, stands for one factor on many gradients.
        given = factor if isinstance(factor, Tensor) else number
        for _, names, other, divides in self.factors:
            if name in names or divides != inverse:
                continue
            # On the CPU a comparison waits for nothing.
            is_on_cpu = other.device.type == given.device.type == "cpu"
            if other.data_ptr() == given.data_ptr() or (is_on_cpu and bool(other == given)):
                names.add(name)
                return
        number = (number.reciprocal() if inverse else number).view(())
        self.factors.append((number, {name}, given, inverse))
        if unscales:
            self._unscaling = number

    def factor(self) -> GivenFactor | None:
        """Product of the factors; None: there is none. MisconfigurationException: one is on some gradients only."""
        if any(names != self._names for _, names, *_ in self.factors):
            raise self.error("all gradients of the optimizer must be scaled alike: clip all of its parameters together")
        if not self.factors:
            return None
        return GivenFactor(reduce(torch.mul, (factor for factor, *_ in self.factors)), self._unscaling)


class ServedGradient(Tensor):
    """A gradient whose memory is elsewhere, perhaps on other ranks: of the shape, type and device of its parameter.

    Norms of order 2 are those that were taken at the gradient's arrival. A product with one number is recorded, and must be put on all
    gradients of the optimizer: these two are `torch.nn.utils.clip_grad_norm_`, and with a test for infinities `torch.amp.GradScaler`.
    Every other operation that reads it has a copy; those that write it are refused, but for autograd's sum over micro-batches. A view has a
    copy of its own, and writes to it are refused as well.
    """

    _name: str
    _whole: torch.Size
    _holder: "ServedGradients"
    _copy: Tensor | None = None

    @staticmethod
    def __new__(
        cls, like: Tensor, shape: torch.Size, name: str, holder: "ServedGradients", copy: Tensor | None = None
    ) -> Self:
        """The one of a parameter by its name, or of its local shard, `like`, whose whole shape this is; or a view, which has a `copy`.
        `holder` is a weak reference: who keeps a gradient keeps no training.
        """
        served = cls._of_shape(like, shape)
        served._name, served._whole, served._holder, served._copy = name, shape, holder, copy
        return served

    @classmethod
    def _of_shape(cls, like: Tensor, shape: torch.Size) -> Self:
        # Private: torch's constructor of tensors without memory that see operations.
        strides = like.stride() if like.shape == shape else None
        made: Self = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=like.dtype, device=like.device)
        return made

    def put_into(self, parameter: Tensor) -> None:
        """Becomes the `grad` of its parameter, whose shape it must have for that: under stage 3 it is empty unless it is gathered."""
        try:
            self.data = self._of_shape(self, parameter.shape)
            parameter.grad = self
        finally:
            self.data = self._of_shape(self, self._whole)

    # Functions of torch go on to `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no `cls`
        """Serves one operation."""
        operation, kwargs = func.overloadpacket, kwargs or {}
        first = args[0]
        served = list(first) if isinstance(first, Sequence) else [first]
        is_whole = [isinstance(gradient, cls) and gradient._copy is None for gradient in served]
        if operation in (_aten.detach, _aten.alias):
            return first
        if operation is _aten.add_ and all(is_whole) and not kwargs:
            first._holder.add(first._name, args[1])
            return first
        if operation in (_aten.linalg_vector_norm, _aten.norm) and all(is_whole) and _is_plain_norm(args[1:], kwargs):
            return first._holder.of_step().norm(first._name)
        if operation is _aten._foreach_norm and len(args) < 3 and not kwargs:
            return [torch.linalg.vector_norm(gradient, *args[1:]) for gradient in served]
        if operation in (_aten.mul_, _aten._foreach_mul_, _aten.div_, _aten._foreach_div_) and any(is_whole):
            inverse = operation in (_aten.div_, _aten._foreach_div_)
            factors = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(served)
            for gradient, factor, records in zip(served, factors, is_whole, strict=True):
                if records:
                    gradient._holder.of_step().scale(gradient._name, factor, inverse=inverse)
                else:  # of another optimizer, or an empty shard
                    (gradient.div_ if inverse else gradient.mul_)(factor)
            return first if operation in (_aten.mul_, _aten.div_) else None
        if operation is _aten._amp_foreach_non_finite_check_and_unscale_:
            _, found_inf, inverse_scale = args
            func([g for g in served if not isinstance(g, cls)], found_inf, inverse_scale)
            for gradient in (g for g in served if isinstance(g, cls)):
                is_infinite = ~gradient._holder.of_step().norm(gradient._name).isfinite()
                found_inf.copy_(torch.maximum(found_inf, is_infinite.to(found_inf)))
                gradient._holder.of_step().scale(gradient._name, inverse_scale, unscales=True)
            return None
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for gradient in (g for g in tree_leaves(written) if isinstance(g, cls)):
                    raise gradient._holder.of_step().error(f"`{func}` would change it")
        copies = tree_map(lambda value: value.read() if isinstance(value, cls) else value, (args, kwargs))
        result = func(*copies[0], **copies[1])
        if func._schema.is_mutable or all(returned.alias_info is None for returned in func._schema.returns):
            return result
        return tree_map(lambda copy: cls(copy, copy.shape, first._name, first._holder, copy), result)

    def read(self) -> Tensor:
        """`StepGradients.read`, of the parameter or of its local shard. Waits for the device."""
        return self._holder.of_step().read(self._name) if self._copy is None else self._copy

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


def _is_plain_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments behind the tensor ask for the norm of order 2 of all elements, and for nothing else."""
    order = args[0] if args else kwargs.get("ord", kwargs.get("p", 2))
    return isinstance(order, int | float) and float(order) == 2.0 and len(args) < 2 and kwargs.keys() <= {"ord", "p"}
