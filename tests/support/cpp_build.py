"""Builds of the worker and the C++ tests of ``tests/cpp``, plain and with sanitizers. As a script, makes all of them in a folder.

They take most of a minute, and few other tests use more than one core, so `conftest` starts them in the background.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "csrc"
SANITIZERS = ("plain", "address", "thread")
"""Plain: none, as released. Address includes undefined behaviour."""
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


def build(sanitizer: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Configures and builds for one of `SANITIZERS`."""
    option = "-DZENFLOW_SANITIZE=" + sanitizer.replace("plain", "")
    configured = configure(directory, "-DZENFLOW_WERROR=ON", "-DZENFLOW_TESTS=ON", option)
    if configured.returncode != 0:
        return configured
    return run([program("cmake") or "", "--build", directory, "--parallel", "2"], timeout_s=BUILD_TIMEOUT_S)


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


class Builds:
    """All builds, made in sequence by a background process of low priority.

    Args:
        folder: receives one folder per build.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, __file__, str(folder)], start_new_session=True
        )

    def get(self, sanitizer: str) -> Build:
        """Waits for a build.

        Raises:
            AssertionError: the build failed; contains the compiler's output.
        """
        failure = self._folder / f"{sanitizer}.failure"
        while not failure.exists() and self._process.poll() is None:
            time.sleep(0.01)
        assert failure.exists(), f"the builds exited with status {self._process.returncode}, see their output"
        assert failure.read_text() == ""
        return Build(directory=self._folder / sanitizer)

    def end(self) -> None:
        """Stops unfinished builds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(folder: Path) -> None:
    """Makes all builds; writes the output of each one that failed, otherwise nothing, to its own file."""
    for sanitizer in SANITIZERS:
        built = build(sanitizer, folder / sanitizer)
        temporary = folder / "failure"
        temporary.write_text(built.stdout if built.returncode != 0 else "")
        temporary.rename(folder / f"{sanitizer}.failure")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
