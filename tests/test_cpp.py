"""Builds the worker and the C++ tests of ``tests/cpp`` and runs them: as shipped, and under sanitizers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from worker_fuzzer import fuzz

_SOURCE = Path(__file__).parents[1] / "csrc"
_BUILD_TIMEOUT_S = 900
_RUN_TIMEOUT_S = 300
_SANITIZERS = ("plain", "address", "thread")
"""Plain: none, as shipped. Address comes with undefined."""
_GROUPS = (
    "half",
    "replay_adamw",
    "device_kernels",
    "arena",
    "channel",
    "cores",
    "first_touch",
    "step_records",
    "block_replay",
    "worker",
)
_ONLY_PLAIN = ("kill",)
"""Steps through the worker as it is shipped; a sanitizer's own instructions would be the most of it."""
_GROUPS_WITH_THREADS = ("channel", "cores", "first_touch", "step_records", "block_replay", "worker")


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


def _program(name: str) -> str | None:
    # A virtual environment's programs are found whether or not it has been activated.
    return shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    )


def _cmake() -> str:
    program = _program("cmake")
    if program is None:
        pytest.fail("the C++ tests need CMake: pip install cmake ninja")
    return program


def _run(command: list[str | Path], *, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **environment},
        check=False,
    )


def _configure(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ninja = _program("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    return _run(
        [_cmake(), "-S", _SOURCE, "-B", directory, *generator, *options], timeout_s=_BUILD_TIMEOUT_S, **environment
    )


def _skip_unless_sanitizer_works(directory: Path, sanitizer: str) -> None:
    """Not every machine has the sanitizers' libraries, and some kernels' address layouts are not for them."""
    source = directory / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    probe = directory / "probe"
    built = _run([compiler, f"-fsanitize={sanitizer}", source, "-o", probe], timeout_s=_BUILD_TIMEOUT_S)
    if built.returncode != 0:
        pytest.skip(f"{compiler} has no {sanitizer} sanitizer: {built.stdout}")
    ran = _run([probe], timeout_s=_RUN_TIMEOUT_S)
    if ran.returncode != 0:
        pytest.skip(f"the {sanitizer} sanitizer does not run on this machine: {ran.stdout}")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """Gives the worker and its tests for a sanitizer, built when first asked for."""

    @cache
    def build_once(sanitizer: str) -> Build:
        directory = tmp_path_factory.mktemp(f"build_{sanitizer}")
        option = "-DZENFLOW_SANITIZE="
        if sanitizer != "plain":
            option += sanitizer
            _skip_unless_sanitizer_works(directory, sanitizer)
        configured = _configure(directory, "-DZENFLOW_WERROR=ON", "-DZENFLOW_TESTS=ON", option)
        assert configured.returncode == 0, configured.stdout
        built = _run([_cmake(), "--build", directory, "--parallel", "2"], timeout_s=_BUILD_TIMEOUT_S)
        assert built.returncode == 0, built.stdout
        return Build(directory=directory)

    return build_once


def _cases() -> list[tuple[str, str]]:
    return [
        (sanitizer, group)
        for sanitizer in _SANITIZERS
        for group in (_GROUPS_WITH_THREADS if sanitizer == "thread" else _GROUPS)
    ] + [("plain", group) for group in _ONLY_PLAIN]


@pytest.mark.timeout(2 * _BUILD_TIMEOUT_S)
@pytest.mark.parametrize(("sanitizer", "group"), _cases())
def test_cpp(build: Callable[[str], Build], sanitizer: str, group: str) -> None:
    result = _run(
        [build(sanitizer).tests, group],
        timeout_s=_RUN_TIMEOUT_S,
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


@pytest.mark.timeout(2 * _BUILD_TIMEOUT_S)
@pytest.mark.parametrize("rounds", [40, pytest.param(5000, marks=pytest.mark.slow)])
def test_broken_arenas_and_messages(build: Callable[[str], Build], rounds: int) -> None:
    """An error message and exit code 1, or an answer; never a crash, a sanitizer's report or a hang."""
    assert fuzz(build("address").worker, seed=1000 * rounds, rounds=rounds) == []


@pytest.mark.timeout(2 * _BUILD_TIMEOUT_S)
def test_worker_carries_its_runtimes(build: Callable[[str], Build]) -> None:
    ldd = _program("ldd")
    if ldd is None:
        pytest.skip("ldd is not installed")
    needed = set(
        re.findall(
            r"^\s*(lib[\w+]+)", _run([ldd, build("plain").worker], timeout_s=_RUN_TIMEOUT_S).stdout, re.MULTILINE
        )
    )
    assert needed, "ldd listed nothing"
    assert needed <= {"libc", "libm", "libpthread", "libdl", "librt"}


def test_without_a_compiler_cmake_says_what_to_install(tmp_path: Path) -> None:
    result = _configure(tmp_path / "build", CXX="/nonexistent/c++")
    assert result.returncode != 0
    assert "no C++ compiler was found" in result.stdout
    assert "apt-get install g++" in result.stdout
    assert "dnf install gcc-c++" in result.stdout


def test_unknown_sanitizer_is_refused(tmp_path: Path) -> None:
    result = _configure(tmp_path / "build", "-DZENFLOW_SANITIZE=adress")
    assert result.returncode != 0
    assert "'adress'" in result.stdout
