"""Tensors as files of torch have them: parts of buffers with storages of their own, and moments of fewer bits, which every reader of a file
gets as float32.
"""

from operator import methodcaller
from typing import Any, SupportsIndex
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_ranges: "WeakValueDictionary[tuple[int, int], UntypedStorage]" = WeakValueDictionary()
"""Of parts of buffers, by their begin and end: tensors in the same range share them, so that a file has tied weights once."""


@torch.no_grad()
def with_own_storage(part: Tensor) -> Tensor:
    """A part of a tensor, in its memory, as a tensor whose storage is that part: torch's files hold whole storages."""
    storage, itemsize, begin = part.untyped_storage(), part.element_size(), part.storage_offset()
    steps = zip(part.shape, part.stride(), strict=True)
    end = begin + 1 + sum((n - 1) * step for n, step in steps) if part.numel() else begin
    at = int(storage.data_ptr() + begin * itemsize), int(storage.data_ptr() + end * itemsize)
    if (own := _ranges.get(at)) is None:
        own = _ranges[at] = storage[begin * itemsize : end * itemsize]
    alone = torch.empty(0, dtype=part.dtype, device=part.device).set_(own, 0, part.shape, part.stride())
    return alone.requires_grad_(part.requires_grad)


def saved_as_float32(moment: Tensor) -> Tensor:
    """The tensor, which is pickled so that every reader gets float32."""
    return moment if moment.dtype == torch.float32 else moment.as_subclass(SavedAsFloat32)


class SavedAsFloat32(Tensor):
    """A tensor that is pickled as the call of `Tensor.float` on a tensor of its own type."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return methodcaller("float"), (self.as_subclass(Tensor),)


class WithoutConversion(TorchFunctionMode):
    """Context in which `torch.load` leaves such tensors in the type that the file has, mapped."""

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.float else function(*args, **(kwargs or {}))
