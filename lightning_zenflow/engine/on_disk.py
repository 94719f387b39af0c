"""Copies of states in files without a name, for saves: in memory they would take as much again as the states themselves."""

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

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
