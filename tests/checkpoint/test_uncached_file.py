"""Files that are written past the page cache, where the file system and the disk do not do as asked."""

import errno
import fcntl
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_zenflow.checkpoint import files
from lightning_zenflow.checkpoint.files import UncachedFile
from processes import leaves_no_file_open


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
def test_more_than_a_chunk(code: int | None, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 2**16)
    monkeypatch.setattr(Refusing, "code", code)

    class File(UncachedFile, Refusing):
        """The order of the bases is as in `UncachedFile`, with the disk's doing before `FileIO`."""

    data, path = torch.arange(100_003, dtype=torch.int32), tmp_path / "file"

    def save() -> None:
        with File(path) as file:
            torch.save(data, file, _use_new_zipfile_serialization=zipped)

    with leaves_no_file_open():
        is_direct = False
        with File(path) as file:
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
