"""Operations that meet weights of 16 bits in mixed precision, and have no kernel for two types: a batch norm with float32 statistics."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

_WIDENED: dict[str, tuple[int, ...]] = {
    # Weight and bias.
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
    "layer_norm": (2, 3),
    "group_norm": (2, 3),
    "embedding_bag.padding_idx": (0, 6),
    **dict.fromkeys(("dot", "inner", "linalg_cross", "mv", "tensordot", "vdot"), (0, 1)),
    "addmv": (0, 1, 2),
    "bilinear": (0, 1, 2, 3),
    "lerp.Scalar": (0, 1),
    "lerp.Tensor": (0, 1, 2),
    # What is written into another tensor.
    **dict.fromkeys(("index_put", "index_put_", "masked_scatter", "masked_scatter_"), (2,)),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"), (3,)),
    **dict.fromkeys(("scatter.src", "scatter_.src", "scatter_add", "scatter_add_"), (3,)),
    **dict.fromkeys(("scatter_reduce.two", "scatter_reduce_.two"), (3,)),
}
"""Operation of torch -> places of the arguments that become float32 where another one is."""


@cache
def complete_autocast(device: str) -> Library:
    """Makes these operations run under `torch.autocast` where some of their arguments have 16 bits and others are float32, as with all of
    them in float32. Torch has an error there, or a rule of its own, which stays. For the life of the process.

    Args:
        device: type of the device.
    """
    library, key = Library("aten", "IMPL"), f"Autocast{device.upper()}"
    for name, places in _WIDENED.items():
        # Private: torch has no public question for it, and warns where a kernel takes the place of its own.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(operation, _widened(operation, places, device), key)
    return library


def _widened(operation: Callable[..., Any], places: tuple[int, ...], device: str) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        widens = any(isinstance(arg, Tensor) and arg.dtype == torch.float32 for arg in args)
        # In place of autocast's own dispatch, behind which the operation would come here again.
        with torch.autocast(device, enabled=False):
            return operation(*(_wide(a) if widens and i in places else a for i, a in enumerate(args)), **keywords)

    return run


def _wide(value: Any) -> Any:
    is_short = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_short else value
