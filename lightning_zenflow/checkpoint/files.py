"""Files of a checkpoint as torch writes them: reading, comparison with their checksums, and errors that name them."""

import errno
import fcntl
import io
import mmap
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.deepspeed.host_state import WithoutConversion
from lightning_zenflow.offload.run_state import VERSION

_CHUNK_BYTES = 2**20
"""Read or copied at once, the latter under Python's lock."""

_PIECE_BYTES = 2**24
"""Written at once."""


def place_of(path: Any) -> Path | str:
    """A path of the local file system; or a store's URL, which fsspec knows, as it is."""
    scheme, separator, name = str(path).partition("://")
    if separator and scheme not in ("file", "local"):
        return str(path)
    # Without a trailing slash, as the name of a file.
    return Path(os.path.normpath(name if separator else scheme))


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model; the message names the checkpoint or the file."""


def refusal(path: Path | str, message: str) -> CheckpointError:
    """The error of a checkpoint or one of its files."""
    return CheckpointError(f"checkpoint {path}: {message}")


def refuse_other_version(path: Path | str, ours: Mapping[str, Any] | None, weights: str) -> None:
    """Raises CheckpointError if another version has written what continues the run, a rank's `ZenFlowStep.state_dict` if there is one;
    `weights` says how one begins from its weights.
    """
    if ours is not None and ours["version"] != VERSION:
        raise refusal(
            path,
            f"the layout must be {VERSION}, got {ours['version']}: another version of lightning-zenflow wrote the checkpoint; continue with"
            f" that version, or begin anew from its weights{weights}",
        )


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Converts every error of a file that torch cannot read.

    Raises:
        CheckpointError: names the file; its cause is the error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise refusal(
            file,
            f"this file has a Python object that cannot be loaded ({type(error).__name__}: {error}): what defined it when it was saved, as"
            " the class of a hyperparameter, must be importable under the same name",
        ) from error
    except Exception as error:
        raise refusal(file, f"this file is truncated or damaged ({type(error).__name__}: {error})") from error


def verify(file: Path) -> None:
    """Compares a file written by torch with its checksums; one of torch's former format has none.

    Raises:
        CheckpointError: it is damaged.
    """
    with _reading(file):
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # 0 where torch was told to compute none.
                if entry.CRC != 0:
                    with archive.open(entry) as content:
                        while content.read(_CHUNK_BYTES):
                            pass


def read(file: Path, *, mapped: bool = True, weights_only: bool | None = False) -> Any:
    """Content of a file written by torch; large tensors are memory-mapped, or not.

    Args:
        file: the file.
        mapped: whether they are.
        weights_only: see `torch.load`; None is its default.

    Raises:
        CheckpointError: see `verify`; or the file has other objects than `weights_only` allows.
    """
    # A file that is no archive has torch's former format, which cannot be mapped, or is incomplete.
    with _reading(file), WithoutConversion():
        is_archive = zipfile.is_zipfile(file)
        try:
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped and is_archive)
        except pickle.UnpicklingError as error:
            if weights_only is False or not is_archive:
                raise
            raise refusal(file, "this file has Python objects: if you trust it, pass `weights_only=False`") from error


def new_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] on the CPU, which begins with a page. The kernel gives the memory when it is written first."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, dtype.itemsize * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


@contextmanager
def uncached(path: Any, pause: Callable[[int], None]) -> Iterator["UncachedFile"]:
    """Context with an `UncachedFile`, in which this thread's `torch.save` has each storage begin with a page of the file."""
    aligned: AbstractContextManager[Any] = nullcontext()
    # Not in torch 2.6.
    with suppress(ImportError):
        from torch.utils.serialization import config

        if hasattr(config.save, "storage_alignment"):
            aligned = config.patch({"save.storage_alignment": mmap.PAGESIZE})  # type: ignore[attr-defined]  # torch adds it to the module
    with aligned, UncachedFile(path, pause) as file:
        yield file


class UncachedFile(io.FileIO):
    """A new file that is written past the page cache: to fill that, and to write its pages to the disk, would take cores from training.

    What begins with a page, in memory (`new_pages`) and in the file (`uncached`), is written from where it is; all else is copied first.

    Args:
        path: path of the file.
        pause: called behind each write, with its bytes.
    """

    def __init__(self, path: Any, pause: Callable[[int], None]) -> None:
        super().__init__(path, "wb")
        self._pause = pause
        self._chunk = mmap.mmap(-1, _CHUNK_BYTES)
        # File systems in memory refuse.
        with suppress(OSError):
            fcntl.fcntl(self, fcntl.F_SETFL, os.O_DIRECT)

    @override
    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        n_bytes = left.nbytes
        if n_bytes >= _CHUNK_BYTES and self._chunk.tell() % mmap.PAGESIZE == 0:
            self._write_chunk()
            n_rest = n_bytes % mmap.PAGESIZE
            left = left[n_bytes - n_rest - self._write_out(left[: n_bytes - n_rest]).nbytes :]
        while left:
            left = left[self._chunk.write(left[: _CHUNK_BYTES - self._chunk.tell()]) :]
            if self._chunk.tell() == _CHUNK_BYTES:
                self._write_chunk()
        return n_bytes

    @override
    def flush(self) -> None:
        # The rest may end within a page.
        fcntl.fcntl(self, fcntl.F_SETFL, 0)
        self._write_chunk()

    def _write_chunk(self) -> None:
        left = memoryview(self._chunk)[: self._chunk.tell()]
        self._chunk.seek(0)
        if left := self._write_out(left):
            # Not even a chunk has the right length, or a part of one was written, so that the rest has not.
            fcntl.fcntl(self, fcntl.F_SETFL, 0)
            self._write_out(left)

    def _write_out(self, left: memoryview) -> memoryview:
        """Writes memory; returns what the file system refuses to write past the page cache."""
        try:
            while left:
                n_bytes = super().write(left[:_PIECE_BYTES])
                left = left[n_bytes:]
                self._pause(n_bytes)
        except OSError as error:
            is_direct = fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT
            if not is_direct or error.errno not in (errno.EFAULT, errno.EINVAL, errno.ENOTSUP):
                raise
        return left
