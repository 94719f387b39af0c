"""`Selector`: what it reads from the device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.topk.selector import Selector

WAITS = ("cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__")


class OnDevice(Tensor):
    """Stands for a tensor on a device; so do the results of its operations. Notes how the host gets values from it."""

    read: list[str]

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copied = func is Tensor.copy_ and not isinstance(args[0], cls)
        if is_copied or (func.__name__ in WAITS and isinstance(args[0], cls)):
            cls.read.append(func.__name__)
        if is_copied:  # to the host
            return args[0].copy_(args[1].as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("strategy", ["step", "random_selection:choose"])
def test_one_copy_has_all_that_a_selection_reads(strategy: str) -> None:
    """What is finite, the columns, and how many of them were chosen before."""
    columns = [12, 0, 20, 12]
    selector = Selector(
        list("abcd"), columns, topk_ratio=0.5, strategy=strategy, interval=1, device=torch.device("cpu")
    )
    norms = selector.new_column_norms()
    norms.flat = norms.flat.as_subclass(OnDevice)
    generator = torch.Generator().manual_seed(1)
    before: set[tuple[int, int]] = set()
    for step in range(1, 6):
        with torch._C.DisableTorchFunctionSubclass():
            norms.flat.copy_(torch.rand(sum(columns), generator=generator))
            if step == 3:
                norms.flat[7] = torch.nan
        OnDevice.read = []
        chosen = selector.select(norms, step)
        assert OnDevice.read == ["copy_"]
        if step == 3:
            assert chosen is None
            continue
        assert chosen is not None
        fresh = {(i, c) for i, of_one in enumerate(chosen) if of_one is not None for c in of_one.host.tolist()}
        if before:
            assert selector.last_overlap == len(before & fresh) / len(fresh)
        before = fresh
