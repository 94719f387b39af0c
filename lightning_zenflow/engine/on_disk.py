"""Copies of states in files without a name, for saves: in memory they would take as much again as the states themselves."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


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
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        # A write to a page that a full disk has no place for would end the process.
        os.posix_fallocate(file.fileno(), 0, dtype.itemsize * numel)
        return torch.from_file(file.name, shared=True, size=numel, dtype=dtype, device="cpu")


def with_own_storage(flat: Tensor, begin: int, shape: Sequence[int]) -> Tensor:
    """A part of a flat tensor on the CPU, in its memory, as a tensor whose storage is that part: torch's files hold whole storages.

    Args:
        flat: 1-D, of a type that numpy has.
        begin: first element.
        shape: of the result.
    """
    return torch.from_numpy(flat.detach().narrow(0, begin, torch.Size(shape).numel()).numpy()).view(torch.Size(shape))
