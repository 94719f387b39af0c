"""Tensors of another type that every reader of a file gets as float32, except for this package's own, which leaves them as they are.

Moments in bfloat16 are saved and loaded so, in DeepSpeed's format and without copies of twice their size.
"""

import pickle
from operator import methodcaller
from types import ModuleType
from typing import Any, SupportsIndex

from torch import Tensor
from typing_extensions import override


class SavedAsFloat32(Tensor):
    """A tensor that is pickled as the call of `Tensor.float` on a tensor of its own type."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return methodcaller("float"), (self.as_subclass(Tensor),)


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("operator", "methodcaller"):
            return lambda method, *args: (lambda x: x) if method == "float" else methodcaller(method, *args)
        return super().find_class(module, name)


UNCONVERTED = ModuleType("pickle")
"""The module `pickle` for `torch.load`, with an unpickler that leaves tensors that were `SavedAsFloat32` in their own type, mapped."""
vars(UNCONVERTED).update(vars(pickle), Unpickler=_Unpickler)
