"""Builds of the worker and the C++ tests of ``tests/cpp``: unoptimized, as released, and with sanitizers."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

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


def run(command: list[str | Path], *, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with both output streams merged."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
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
    cmake = program("cmake")
    if cmake is None:
        raise RuntimeError("the C++ tests need CMake: pip install cmake ninja")
    ninja = program("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    return run([cmake, "-S", SOURCE, "-B", directory, *generator, *options], timeout_s=BUILD_TIMEOUT_S, **environment)


def build(variant: str) -> Path:
    """Builds one of `VARIANTS` in a folder that is kept, so that the next run compiles only what has changed since.

    Returns:
        The folder, with ``zenflow-worker`` and, in ``tests``, ``zenflow-tests``.

    Raises:
        RuntimeError: the build failed; with its output.
    """
    compiler = program(os.environ.get("CXX", "c++")) or "none"
    version = run([compiler, "--version"], timeout_s=BUILD_TIMEOUT_S).stdout if compiler != "none" else ""
    key = hashlib.sha256(f"{compiler}\n{version}".encode()).hexdigest()[:8]
    directory = SOURCE.parent / "build" / f"cpp-{variant}-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        # Tests in other processes build it too.
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = configure(directory, "-DZENFLOW_WERROR=ON", "-DZENFLOW_TESTS=ON", *VARIANTS[variant])
        if done.returncode == 0:
            made = ["--build", directory, "--target", "zenflow-tests", "--parallel", "2"]
            done = run([program("cmake") or "", *made], timeout_s=BUILD_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return directory


@cache
def folder_of(variant: str) -> Path:
    """`build`; skips the test if this machine lacks the sanitizer, or has an address space layout that it does not support."""
    if variant in ("address", "thread"):
        probe = [os.environ.get("CXX", "c++"), f"-fsanitize={variant}", "-x", "c++", "-", "-o", "/dev/null"]
        if run(["sh", "-c", f"echo 'int main() {{}}' | {' '.join(probe)}"], timeout_s=BUILD_TIMEOUT_S).returncode != 0:
            pytest.skip(f"the compiler has no {variant} sanitizer")
    folder = build(variant)
    if (
        variant == "thread"
        and "FATAL" in run([folder / "zenflow-worker", "--version"], timeout_s=BUILD_TIMEOUT_S).stdout
    ):
        pytest.skip("the thread sanitizer does not run on this machine")
    return folder
