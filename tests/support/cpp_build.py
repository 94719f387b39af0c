"""Builds of the worker and the C++ tests of ``tests/cpp``: unoptimized, as released, and with sanitizers."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "csrc"
VARIANTS = {
    "quick": "-DZENFLOW_QUICK=ON",
    "release": "-DZENFLOW_SANITIZE=",
    "address": "-DZENFLOW_SANITIZE=address",
    "thread": "-DZENFLOW_SANITIZE=thread",
}
"""CMake's option of each variant. Address includes undefined behaviour."""
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


def build(variant: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Configures and builds one of `VARIANTS`."""
    configured = configure(directory, "-DZENFLOW_WERROR=ON", "-DZENFLOW_TESTS=ON", VARIANTS[variant])
    if configured.returncode != 0:
        return configured
    made = ["--build", directory, "--target", "zenflow-tests", "--parallel", "2"]
    return run([program("cmake") or "", *made], timeout_s=BUILD_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Build:
    """A finished build of the worker and its tests."""

    directory: Path

    @property
    def tests(self) -> Path:
        """The executable that holds all C++ tests."""
        return self.directory / "tests" / "zenflow-tests"

    @property
    def worker(self) -> Path:
        """The worker executable."""
        return self.directory / "zenflow-worker"
