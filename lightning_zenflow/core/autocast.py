"""Operations that meet weights of 16 bits in mixed precision, and have no kernel for two types: a batch norm with float32 statistics."""

from functools import cache, partial
from typing import Any

import torch
from torch.library import Library

_WIDENED: dict[str, tuple[int, ...]] = {
    "batch_norm": (1, 2), "instance_norm": (1, 2), "layer_norm": (2, 3), "group_norm": (2, 3),
    "addmv": (0, 1, 2), "bilinear": (0, 1, 2, 3), "lerp.Tensor": (0, 1, 2), "embedding_bag.padding_idx": (0, 6),
    **dict.fromkeys(("dot", "inner", "linalg_cross", "mv", "tensordot", "vdot", "lerp.Scalar"), (0, 1)),
    # What is written into another tensor; each also in place.
    **{f"{name}{end}": (2,) for name in ("index_put", "masked_scatter") for end in ("", "_")},
    **{f"{name}{end}": (3,) for name in ("index_add", "index_copy", "index_reduce", "scatter_add") for end in ("", "_")},
    **{f"scatter{end}": (3,) for end in (".src", "_.src", "_reduce.two", "_reduce_.two")},
}  # fmt: skip
"""Operation of torch -> places of the arguments that become float32 where another one is."""


@cache
def complete_autocast(device: str) -> Library:
    """Makes these operations run under `torch.autocast` on a type of device with arguments of 16 bits beside float32, as with all of them
    in float32. Torch has an error there, or a rule of its own, which stays. For the life of the process.
    """
    library, key = Library("aten", "IMPL"), f"Autocast{device.upper()}"  # type: ignore[no-untyped-call]
    for name, places in _WIDENED.items():
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        # Private: torch has no public question for its own rules.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            run = partial(_widened, operation, places, device)
            library.impl(operation, run, key)  # type: ignore[no-untyped-call]
    return library


def _widened(operation: Any, places: tuple[int, ...], device: str, *args: Any, **keywords: Any) -> Any:
    types = [getattr(arg, "dtype", None) for arg in args]
    short = [i for i in places if i < len(args) and types[i] in (torch.bfloat16, torch.float16)]
    widened = short if torch.float32 in types else []
    # Without autocast: the operation would come here again.
    with torch.autocast(device, enabled=False):
        return operation(*(arg.float() if i in widened else arg for i, arg in enumerate(args)), **keywords)
