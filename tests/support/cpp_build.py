"""Builds of the worker and the C++ tests of ``tests/cpp``: unoptimized, as released, and with sanitizers."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "csrc"
VARIANTS = {
    "quick": ["-DZENFLOW_OPTIMIZE=0"],
    "release": [],
    "address": ["-DZENFLOW_SANITIZE=address", "-DZENFLOW_OPTIMIZE=1"],
    "thread": ["-DZENFLOW_SANITIZE=thread", "-DZENFLOW_OPTIMIZE=1"],
}
"""CMake's options of each variant. Address includes undefined behaviour."""
BUILD_TIMEOUT_S = 900


def variants(*left_out: str) -> list[Any]:
    """Parameters of tests, of which all but the quick one are slow."""
    return [pytest.param(v, marks=[pytest.mark.slow] * (v != "quick")) for v in VARIANTS if v not in left_out]


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with both output streams merged."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        env={**os.environ, **environment},
        check=False,
    )


def program(name: str) -> str | None:
    """Path of a program; includes those of a virtual environment that is not activated."""
    return shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    )


def configure(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake."""
    cmake, ninja = program("cmake"), program("ninja")
    if cmake is None:
        raise RuntimeError("the C++ tests need CMake: pip install cmake ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    return run([cmake, "-S", SOURCE, "-B", directory, *generator, *options], **environment)


@cache
def folder_of(variant: str) -> Path:
    """Builds one of `VARIANTS` in a folder that is kept, so that the next run compiles only what has changed since. Skips the test if this
    machine lacks the sanitizer, or has an address space layout that it does not support.

    Returns:
        The folder, with ``zenflow-worker`` and, in ``tests``, ``zenflow-tests``.

    Raises:
        RuntimeError: the build failed; with its output.
    """
    compiler = os.environ.get("CXX", "c++")
    probe = f"echo 'int main() {{}}' | {compiler} -fsanitize={variant} -x c++ - -o /dev/null"
    if variant in ("address", "thread") and run(["sh", "-c", probe]).returncode != 0:
        pytest.skip(f"the compiler has no {variant} sanitizer")
    version = run(["sh", "-c", f"command -v {compiler} && {compiler} --version"]).stdout
    directory = SOURCE.parent / "build" / f"cpp-{variant}-{hashlib.sha256(version.encode()).hexdigest()[:8]}"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        # Tests in other processes build it too.
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = configure(directory, "-DZENFLOW_WERROR=ON", "-DZENFLOW_TESTS=ON", *VARIANTS[variant])
        if done.returncode == 0:
            done = run([program("cmake") or "", "--build", directory, "--target", "zenflow-tests", "--parallel", "2"])
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    if variant == "thread" and "FATAL" in run([directory / "zenflow-worker", "--version"]).stdout:
        pytest.skip("the thread sanitizer does not run on this machine")
    return directory
