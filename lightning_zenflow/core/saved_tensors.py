"""Tensors as files of torch have them: parts of buffers with storages of their own, copies whose memory is on the disk, and moments of
fewer bits, which every reader of a file gets as float32.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
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


class DiskCopies:
    """Memory of one save's copies: mapped files without a name, in `folder`, of which the page cache may give memory back to others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: list[tuple[mmap.mmap, range]] = []

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[numel], zeros, on the disk; OSError if that is full."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with tempfile.TemporaryFile(dir=self._folder) as file:
            # A write to a page that a full disk has no place for would end the process.
            os.posix_fallocate(file.fileno(), 0, dtype.itemsize * numel)
            # By the descriptor: others who may write in the folder could put another file in the place of one with a name.
            memory = mmap.mmap(file.fileno(), 0)
        copied = torch.frombuffer(memory, dtype=dtype)
        self._mapped.append((memory, range(copied.data_ptr(), copied.data_ptr() + copied.nbytes)))
        return copied

    def has(self, address: int) -> bool:
        """Whether an address is in one of the copies."""
        return any(address in addresses for _, addresses in self._mapped)

    def close(self) -> None:
        """Gives the space back to the disk; all elements are zeros from now on. Errors of a save, and a cycle that torch's code for files
        leaves until a collection, refer to the copies. May be called again.
        """
        for memory, _ in self._mapped:
            # Where a file system has no holes, the collection frees it.
            with suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE)
        self._mapped.clear()


def parts_on_disk(disk: DiskCopies, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors on the disk, all in one file: each file takes a descriptor."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = zip(shapes.items(), torch.split(disk.zeros(sum(sizes), dtype), sizes), strict=True)
    return {name: with_own_storage(part.view(shape)) for (name, shape), part in parts}


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
