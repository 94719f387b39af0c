"""Tensors of the recorded device and of the host: torch's methods that tell them apart or move them, and operations on both.

Both are CPU tensors. The device is called cpu:0, by strategies too while it is recorded, and the host cpu. A tensor is the device's if an
operation that names cpu:0 or has an argument there made its memory (`Watch`). All other memory is the host's: what was there before,
results of factories without device and of `.cpu()`, what comes from Python's numbers or from files.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_zenflow.between_steps.served_gradients import ServedGradient

DEVICE, CPU = torch.device("cpu", 0), torch.device("cpu")

_COPIES = frozenset(["copy_", "_to_copy", "_foreach_copy_"])
_INDEXED = frozenset(["index", "index_put", "index_put_"])
_READ_BY_THE_HOST = {
    *("_local_scalar_dense", "equal", "allclose", "is_nonzero"),
    # The size of their results depends on values.
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
    "bincount",
}


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What an operation with arguments on the device needs of the host, by CUDA's and torch's rules."""

    kind: Literal["launch", "d2h", "h2d"]
    name: str
    sources: Sequence[Tensor]
    """Read, in host memory."""
    targets: Sequence[Tensor]
    """Written, in host memory."""
    converts: bool
    """Whether the elements must be brought in order, or to another type, on the way; in pageable memory where the host is the source."""
    masks: bool
    """Whether a boolean mask chooses elements, which the host counts."""

    @classmethod
    def of(
        cls, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, is_on_device: Callable[[Tensor], bool]
    ) -> "Transfer":
        """Of an operation by its name, and its arguments and results."""
        sources, targets = ([t for t in ts if t.numel() and not is_on_device(t)] for ts in (reads, writes))
        kind: Literal["launch", "d2h", "h2d"] = "launch"
        if name in _COPIES and (sources or targets):
            kind = "d2h" if targets else "h2d"
        of_host = targets or sources
        masks = name in _INDEXED and any(t.dtype in (torch.bool, torch.uint8) for t in reads[name == "index" :])
        # torch fills where the value is a single number of the host.
        masks = masks and not (name != "index" and reads[-1].dim() == 0 and not is_on_device(reads[-1]))
        return cls(
            kind=kind,
            name=name,
            sources=sources,
            targets=targets,
            converts=not all(t.is_contiguous() for t in of_host)
            or (kind == "h2d" and reads[0].dtype != writes[0].dtype),
            masks=masks,
        )

    @property
    def mixes(self) -> bool:
        """Whether torch would refuse it: a kernel reads single numbers of the host only, and indexes, and writes nothing there."""
        if self.kind != "launch":
            return False
        is_index = self.name in _INDEXED
        foreign = [t for t in self.sources if t.dim() and not (is_index and not t.dtype.is_floating_point)]
        return bool(self.targets or foreign)

    def waits(self, *, non_blocking: bool, is_page_locked: Callable[[Tensor], bool]) -> bool:
        """Whether the host waits for the device.

        Args:
            non_blocking: argument of a copy.
            is_page_locked: whether a tensor of the host is.
        """
        if self.kind != "launch":
            return not non_blocking or self.converts or not all(map(is_page_locked, [*self.sources, *self.targets]))
        indexes = self.name in _INDEXED and any(t.dim() for t in self.sources)
        return self.name in _READ_BY_THE_HOST or self.masks or indexes


_device = Tensor.device.__get__  # a descriptor
_to, _numpy, _tolist, _tensor = Tensor.to, Tensor.numpy, Tensor.tolist, torch.tensor
_wrapper = Tensor._make_wrapper_subclass


def tell_apart(is_on_device: Callable[[Tensor], bool], stack: ExitStack) -> None:
    """Makes tensors say where they are, and move between device and host, until the stack ends.

    Args:
        is_on_device: whether a tensor is in the memory of the recorded device.
        stack: receives the patches.
    """

    def device(tensor: Tensor) -> torch.device:
        real: torch.device = _device(tensor)
        if isinstance(tensor, ServedGradient):
            return DEVICE
        return DEVICE if real.type == "cpu" and is_on_device(tensor) else real

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        # Private: what `Module.to` reads its arguments with.
        target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        options = {"dtype": dtype or tensor.dtype, "memory_format": memory_format or torch.preserve_format}
        if target is None or "meta" in (target.type, tensor.device.type) or target == tensor.device:
            return _to(tensor, *((target,) if target and target.type == "meta" else ()), copy=copy, **options)
        with torch._C._DisableTorchDispatch():
            shape = torch.empty_like(tensor, device="meta", **options)
        moved = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=target)
        return moved.copy_(tensor, non_blocking=non_blocking)

    def cpu(tensor: Tensor) -> Tensor:
        return tensor.to(CPU)

    def tolist(tensor: Tensor) -> Any:
        return _tolist(tensor.to(CPU))

    def numpy(tensor: Tensor, **kwargs: Any) -> Any:
        if is_on_device(tensor):
            raise TypeError("can't convert a tensor of the recorded device to numpy: copy it to the host before")
        return _numpy(tensor, **kwargs)

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        # torch makes it in host memory, and copies it where the device is another.
        made = _tensor(data, **kwargs)
        return made if device is None else made.to(device)

    def wrapper_subclass(cls: type[Tensor], *args: Any, **kwargs: Any) -> Any:
        # Without index, as the parameter really is, whose `grad` it becomes.
        return _wrapper(cls, *args, **{**kwargs, "device": CPU})

    def grouped(lists: Sequence[list[Tensor]]) -> dict[tuple[torch.device, torch.dtype], Any]:
        of_keys: dict[tuple[torch.device, torch.dtype], Any] = {}
        for number, tensor in enumerate(lists[0]):
            tensors, numbers = of_keys.setdefault((tensor.device, tensor.dtype), ([[]], []))
            tensors[0].append(tensor)
            numbers.append(number)
        return of_keys

    stack.enter_context(patch.object(Tensor, "_make_wrapper_subclass", wrapper_subclass))
    # Private: torch's groups by what the devices really are.
    stack.enter_context(patch.object(clip_grad, "_group_tensors_by_device_and_dtype", grouped))
    stack.enter_context(patch.object(torch, "tensor", tensor))
    # Private: what DeepSpeed puts in the place of `torch.tensor` behind the division of a model.
    stack.enter_context(patch.object(partition_parameters, "_orig_torch_tensor", tensor))
    stack.enter_context(patch.object(Tensor, "device", property(device), create=True))
    for replacement in (to, cpu, tolist, numpy):
        stack.enter_context(patch.object(Tensor, replacement.__name__, replacement))
