"""Training data from files of every development machine: Python's standard library and C headers.

Files are read in the order of a hash of their relative path, so that the training part and the held-out part are the same mixture of
packages. The same files give the same bytes, whose hash is part of every result.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

PYTHON_BYTES = 3_000_000
HEADER_BYTES = 2_500_000
HEADER_ROOT = Path("/usr/include")

# Installed packages are not the standard library, and its tests differ from the rest.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_corpus(root: Path, files: Iterable[Path], length: int) -> bytes:
    """The first `length` bytes of `files` (below `root`), concatenated in the order of their paths' hashes.

    Raises:
        RuntimeError: the files have fewer bytes.
    """
    named = sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())
    data = bytearray()
    for file in named:
        if file.is_file():
            data += file.read_bytes()
        if len(data) >= length:
            return bytes(data[:length])
    raise RuntimeError(f"the files under {root} must have {length} bytes, got {len(data)}")


def python_library(length: int = PYTHON_BYTES) -> bytes:
    """The first bytes of Python's standard library, .py files only."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(file.relative_to(root).parts)]
    return read_corpus(root, files, length)


def c_headers(length: int = HEADER_BYTES) -> bytes:
    """The first bytes of the C headers.

    Raises:
        RuntimeError: there are too few.
    """
    try:
        return read_corpus(HEADER_ROOT, HEADER_ROOT.rglob("*.h"), length)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}; install C headers (Debian, Ubuntu: apt-get install libc6-dev linux-libc-dev libstdc++-12-dev)"
        ) from error


def sha256(data: bytes) -> str:
    """The first 16 hexadecimal digits of the data's SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def to_tensor(data: bytes) -> Tensor:
    """Bytes as uint8 [length]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
