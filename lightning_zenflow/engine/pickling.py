"""A module in training, pickled and copied as it is without DeepSpeed, whose attributes and hooks neither can be nor belong there."""

import copyreg
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.nn import Module

from lightning_zenflow.engine.pieces import is_divided
from lightning_zenflow.engine.release import names_on, remove_attributes, remove_hooks_in

Reduce = Callable[[Any], Any]
"""What pickle and copy take an object apart with (`object.__reduce_ex__`)."""

_twins: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()
"""Of divided parameters, by their identity: one that two modules share is pickled once. A pickler keeps them until its end."""

_ranges: "WeakValueDictionary[tuple[int, int], UntypedStorage]" = WeakValueDictionary()
"""Of buffers of weights, by their begin and end: tensors in the same range share them, so that a file has tied weights once."""


@contextmanager
def pickled_as_before(parts: Iterable[Module | Tensor]) -> Iterator[None]:
    """Context in which modules and parameters of the types of `parts` are pickled without what DeepSpeed has added to them; under stage 3
    with whole weights. Modules are copied so as well. Parameters, and tensors in their memory such as those of a `state_dict`, are pickled
    with their own elements only.

    Python's registry of such functions has a place for each type, which is free again at the end.
    """
    parts = list(parts)
    parameters: list[Any] = [p for p in parts if isinstance(p, Tensor) and names_on(p)]
    buffers = {t.untyped_storage().data_ptr() for p in parameters for t in (p, getattr(p, "ds_tensor", p))} - {0}
    table: dict[type, Any] = copyreg.dispatch_table
    before = {kind: table.get(kind) for kind in {*map(type, parts), Tensor}}
    for kind, theirs in before.items():
        table[kind] = partial(_reduce, theirs or methodcaller("__reduce_ex__", 4), buffers)
    try:
        yield
    finally:
        for kind, theirs in before.items():
            del table[kind]
            if theirs is not None:
                table[kind] = theirs


def _reduce(theirs: Reduce, buffers: set[int], part: Module | Tensor) -> Any:
    if type(part) is Tensor:
        is_ours = part.layout is torch.strided and part.untyped_storage().data_ptr() in buffers
        return theirs(_alone(part) if is_ours else part)
    if isinstance(part, Tensor):
        return theirs(_twin(part))
    reduced = theirs(part)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    # A class may have its own `__getstate__`, but what it leaves of a module's attributes has their names.
    if not isinstance(state, dict) or "_parameters" not in state:
        return reduced
    ours = {k: type(v)(v) if "_hooks" in k and isinstance(v, dict) else v for k, v in state.items()}
    remove_hooks_in(ours)
    remove_attributes(part, ours)
    # Not by their own `_reduce`, of which copies make no use.
    ours["_parameters"] = {k: p if p is None or not is_divided(p) else _twin(p) for k, p in ours["_parameters"].items()}
    return (*reduced[:2], ours, *reduced[3:])


def _twin(parameter: Any) -> Any:
    """A parameter of the same elements, without DeepSpeed's attributes.

    Raises:
        RuntimeError: other ranks have pieces of it.
    """
    names = names_on(parameter)
    if not names:
        return parameter
    if (known := _twins.get(id(parameter))) is not None:
        return known
    whole = parameter.data
    if is_divided(parameter) and whole.numel() != parameter.ds_numel:
        if dist.get_world_size(parameter.ds_process_group) > 1:
            raise RuntimeError(
                "a parameter that stage 3 has divided can be pickled or copied where it is whole only: do it on all ranks within"
                " `deepspeed.zero.GatheredParameters(module.parameters())`, or save with `trainer.save_checkpoint`"
            )
        whole = parameter.ds_tensor.data.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
    twin: Any = Tensor._make_subclass(type(parameter), _alone(whole), parameter.requires_grad)
    vars(twin).update({k: v for k, v in vars(parameter).items() if k not in names})
    _twins[id(parameter)] = twin
    return twin


@torch.no_grad()
def _alone(tensor: Tensor) -> Tensor:
    """The same elements in the same memory, of which the storage has no others: a file would have all of it."""
    storage, itemsize, begin = tensor.untyped_storage(), tensor.element_size(), tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = begin + 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else begin
    at = int(storage.data_ptr() + begin * itemsize), int(storage.data_ptr() + end * itemsize)
    if (own := _ranges.get(at)) is None:
        own = _ranges[at] = storage[begin * itemsize : end * itemsize]
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(own, 0, tensor.shape, tensor.stride())
    return alone.requires_grad_(tensor.requires_grad)
