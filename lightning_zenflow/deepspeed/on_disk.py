"""States as saves have them, where a copy in memory would take as much again as the states themselves.

Copies are in files without a name. Moments in fewer bits get to every reader of a checkpoint's file as float32, DeepSpeed's tools among
them: with 16 bits the file has those of the arena and the call of `Tensor.float`; this package copies such moments to its own arena, and
leaves that call out. What torch has no type for is copied to disk before, as float32.
"""

import contextlib
import mmap
import os
import tempfile
from operator import methodcaller
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

_mapped: list[mmap.mmap] = []
"""Copies of the present save."""


def on_disk(folder: Path, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[numel], zeros, mapped: the page cache holds it and may give memory back to others.

    Args:
        folder: on the file system that is to hold the file.
        numel: elements.
        dtype: their type.

    Raises:
        OSError: the disk is full.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        # A write to a page that a full disk has no place for would end the process.
        os.posix_fallocate(file.fileno(), 0, dtype.itemsize * numel)
        # By the descriptor: others who may write in the folder could put another file in the place of one with a name.
        _mapped.append(mmap.mmap(file.fileno(), 0))
    return torch.frombuffer(_mapped[-1], dtype=dtype)


def free_disk() -> None:
    """Gives the space of all copies back to the disk, whose elements are zeros from now on. Who has an error of a save refers to them, and
    torch's code for files leaves a cycle that does, until a collection.
    """
    for memory in _mapped:
        # Where a file system has no holes, the collection frees it.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_REMOVE)
    _mapped.clear()


def with_own_storage(part: Tensor) -> Tensor:
    """A contiguous part of a tensor, in its memory, as a tensor whose storage is that part: torch's files hold whole storages."""
    part = part.detach()
    # DLPack forgets the strides of dimensions of one element, by which torch chooses its kernels.
    return from_dlpack(part).as_strided(part.shape, part.stride())


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
