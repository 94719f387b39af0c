"""Moments in fewer bits that every reader of a checkpoint's file gets as float32, DeepSpeed's tools among them.

torch writes a file when all of it is in memory, and float32 copies of both moments would take as much as all else in the arena. So with 16
bits the file has those of the arena and the call of `Tensor.float`; this package copies such moments to its own arena, and leaves that call
out. What torch has no type for is copied to disk before, as float32.
"""

from operator import methodcaller
from typing import Any, SupportsIndex

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override


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
