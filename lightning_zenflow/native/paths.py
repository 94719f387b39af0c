"""Paths of the compiled files: the worker's executable and the library of CPU kernels."""

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_ENVIRONMENT_VARIABLE = "LIGHTNING_ZENFLOW_WORKER"


def worker_executable() -> Path:
    """Path of the worker's executable: ``bin/zenflow-worker`` in the installed package.

    The environment variable ``LIGHTNING_ZENFLOW_WORKER`` overrides it.

    Raises:
        RuntimeError: the file is missing or not executable.
    """
    override = os.environ.get(_ENVIRONMENT_VARIABLE)
    if override:
        return _executable(Path(override), f"named by the environment variable {_ENVIRONMENT_VARIABLE}")
    candidates = _candidates()
    for candidate in candidates:
        if candidate.is_file():
            return _executable(candidate, "installed with lightning_zenflow")
    looked_at = ", ".join(str(candidate) for candidate in candidates)
    raise RuntimeError(
        f"The worker's executable is missing; looked for {looked_at}. It is built when the package is installed: install a C++ "
        "compiler (Debian, Ubuntu: `apt-get install g++`), then run `pip install lightning-zenflow`, or `pip install -e .` in a "
        f"clone of the repository. {_ENVIRONMENT_VARIABLE} can name an executable built elsewhere."
    )


def device_library() -> Path:
    """Path of ``libzenflow-device.so``, in the folder of the worker's executable.

    Raises:
        RuntimeError: the file is missing.
    """
    path = worker_executable().with_name("libzenflow-device.so")
    if not path.is_file():
        raise RuntimeError(
            f"The library {path} is missing; it is built together with the worker's executable: reinstall lightning-zenflow"
        )
    return path


def cannot_run(path: Path, reason: object) -> str:
    """The message for a compiled file that this machine cannot run, with what to do."""
    machine = " ".join(filter(None, (platform.machine(), *platform.libc_ver())))
    return (
        f"{path} cannot run on this machine ({machine}): {reason}; install a wheel of lightning-zenflow for this machine, or build it here:"
        " `pip install --force-reinstall --no-deps .` in a clone of the repository, with g++"
    )


def _candidates() -> list[Path]:
    package = sys.modules[__name__.partition(".")[0]]  # not imported: its __init__ imports rooms above this one
    folders = [Path(folder) for folder in package.__path__]
    # An editable install leaves the sources in place and puts compiled files next to the package's metadata.
    with suppress(PackageNotFoundError):
        folders.append(Path(str(distribution("lightning-zenflow").locate_file("lightning_zenflow"))))
    return [folder / "bin" / "zenflow-worker" for folder in dict.fromkeys(folders)]


def _executable(path: Path, origin: str) -> Path:
    if not path.is_file():
        raise RuntimeError(f"The worker's executable {path}, {origin}, does not exist.")
    if not os.access(path, os.X_OK):
        raise RuntimeError(f"The worker's executable {path}, {origin}, must be executable; run `chmod +x {path}`.")
    return path
