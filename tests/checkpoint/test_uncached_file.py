"""Files that are written past the page cache, where the file system and the disk do not do as asked."""

import errno
import fcntl
import io
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from lightning_zenflow.checkpoint import background
from lightning_zenflow.checkpoint.background import UncachedFile, new_pages, uncached
from processes import leaves_no_file_open


def pause(n_bytes: int) -> None:
    """Not at all."""


class Refusing(io.FileIO):
    """A file of a system that writes half of what it is given, and that refuses direct writes with an error."""

    code: int | None = None

    @override
    def write(self, data: Any) -> int:
        if self.code and fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(memoryview(data)[: max(1, len(data) // 2)])


@pytest.mark.parametrize("code", [None, errno.EINVAL, errno.ENOSPC])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("from_page", [True, False])
def test_more_than_a_chunk(
    code: int | None, zipped: bool, from_page: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_CHUNK_BYTES", 2**16)
    monkeypatch.setattr(background, "_PIECE_BYTES", 2**17)
    monkeypatch.setattr(Refusing, "code", code)

    class File(UncachedFile, Refusing):
        """The order of the bases is as in `UncachedFile`, with the disk's doing before `FileIO`."""

    monkeypatch.setattr(background, "UncachedFile", File)
    data, path = torch.arange(100_003, dtype=torch.int32), tmp_path / "file"
    if from_page:
        data = new_pages(len(data), data.dtype).copy_(data)

    def save() -> None:
        with uncached(path, pause) as file:
            torch.save(data, file, _use_new_zipfile_serialization=zipped)

    with leaves_no_file_open():
        is_direct = False
        with File(path, pause) as file:
            is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        # The former format is written to the descriptor itself, behind a flush.
        if code == errno.ENOSPC and is_direct and zipped:
            with pytest.raises(RuntimeError) as caught:
                save()
            # By which a save names its cause.
            assert isinstance(caught.value.__context__, OSError) and caught.value.__context__.errno == code
        else:
            save()
            torch.testing.assert_close(torch.load(path), data, rtol=0, atol=0)
            assert not zipped or torch.equal(torch.load(path, mmap=True), data)


def test_what_begins_with_a_page_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = new_pages(2**20 + 5, torch.float32).normal_()
    begin, path, sizes = data.data_ptr(), tmp_path / "file", list[int]()

    class Recording(io.FileIO):
        @override
        def write(self, data: Any) -> int:
            if begin <= np.frombuffer(data, np.uint8).ctypes.data < begin + 2**22:
                sizes.append(len(data))
            return super().write(data)

    class File(UncachedFile, Recording):
        """See above."""

    monkeypatch.setattr(background, "UncachedFile", File)
    with uncached(path, pause) as file:
        torch.save({"small": torch.ones(3), "large": data}, file)
    assert sum(sizes) == data.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    assert torch.equal(torch.load(path)["large"], data)
