"""Copies of states on the disk: their space is taken when they are made, and given back whoever refers to them."""

import os
from pathlib import Path

import torch

from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.deepspeed.host_state import with_own_storage
from processes import open_files


def blocks_in(folder: Path) -> int:
    """Bytes on the disk, of files that may have no name."""
    return sum(512 * os.fstat(fd).st_blocks for fd, name in open_files() if str(folder) in name)


def test_space_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    """A write to a page without space would end the process; no other user can swap a file that has no name."""
    disk = DiskCopies(tmp_path)
    copies = [disk.zeros(10_000), disk.zeros(33, torch.bfloat16), disk.zeros(0)]
    assert [c.numel() for c in copies] == [10_000, 33, 0]
    assert not any(c.any() for c in copies) and [*tmp_path.iterdir()] == []
    assert blocks_in(tmp_path) >= 40_000 + 66
    copies[0].fill_(1)
    disk.free()
    assert blocks_in(tmp_path) == 0
    assert not copies[0].any()


def test_own_storage_keeps_strides() -> None:
    flat = torch.arange(12.0, dtype=torch.bfloat16)
    part = flat.narrow(0, 3, 4).view(4, 1).as_strided((4, 1), (1, 7))
    own = with_own_storage(part)
    assert own.untyped_storage().nbytes() == 8 and own.stride() == (1, 7)
    own.fill_(0)
    assert flat.tolist() == [0, 1, 2, 0, 0, 0, 0, 7, 8, 9, 10, 11]
