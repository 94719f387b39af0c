"""The C++ tests of ``tests/cpp`` and a fuzzer of the worker, in a quick build; as released and with sanitizers where `slow` is selected."""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cpp_build
from cpp_build import BUILD_TIMEOUT_S, VARIANTS, Build, configure, program, run
from worker_fuzzer import fuzz

_RUN_TIMEOUT_S = 300
_GROUPS = (
    "half",
    "stochastic_rounding",
    "replay_adamw",
    "device_kernels",
    "arena",
    "channel",
    "cores",
    "export_entries",
    "first_touch",
    "privileges",
    "step_records",
    "block_replay",
    "worker",
)
_ONLY_RELEASE = ("kill",)
"""Single-steps the released worker; in other builds it would execute many times as many instructions."""
_GROUPS_WITH_THREADS = ("channel", "cores", "export_entries", "first_touch", "step_records", "block_replay", "worker")


def _skip_unless_sanitizer_works(directory: Path, sanitizer: str) -> None:
    """Some machines lack the sanitizers' libraries, or have an address space layout that they do not support."""
    source = directory / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    probe = directory / "probe"
    built = run([compiler, f"-fsanitize={sanitizer}", source, "-o", probe], timeout_s=BUILD_TIMEOUT_S)
    if built.returncode != 0:
        pytest.skip(f"{compiler} has no {sanitizer} sanitizer: {built.stdout}")
    ran = run([probe], timeout_s=_RUN_TIMEOUT_S)
    if ran.returncode != 0:
        pytest.skip(f"the {sanitizer} sanitizer does not run on this machine: {ran.stdout}")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """A function that builds a variant, the first time, or skips the test if this machine lacks its sanitizer."""

    @cache
    def made(variant: str) -> tuple[Path, str]:
        directory = tmp_path_factory.mktemp(variant)
        if variant in ("address", "thread"):
            _skip_unless_sanitizer_works(directory, variant)
        done = cpp_build.build(variant, directory)
        return directory, done.stdout if done.returncode != 0 else ""

    def build_of(variant: str) -> Build:
        directory, failure = made(variant)
        assert failure == ""
        return Build(directory=directory)

    return build_of


def _cases() -> list[Any]:
    groups = dict.fromkeys(VARIANTS, _GROUPS) | {"release": (*_GROUPS, *_ONLY_RELEASE), "thread": _GROUPS_WITH_THREADS}
    return [
        pytest.param(variant, group, marks=() if variant == "quick" else pytest.mark.slow)
        for variant in VARIANTS
        for group in groups[variant]
    ]


def test_every_group_runs() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.glob("*.cpp")]
    groups = {group for source in sources for group in re.findall(r"^TEST\((\w+),", source, re.MULTILINE)}
    assert groups == {*_GROUPS, *_ONLY_RELEASE}


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.parametrize(("variant", "group"), _cases())
def test_cpp(build: Callable[[str], Build], variant: str, group: str) -> None:
    result = run(
        [build(variant).tests, group],
        timeout_s=_RUN_TIMEOUT_S,
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.parametrize(("variant", "attacks"), [("quick", 40), pytest.param("address", 5000, marks=pytest.mark.slow)])
def test_broken_arenas_and_messages(build: Callable[[str], Build], variant: str, attacks: int) -> None:
    """The worker answers, or reports an error and exits with 1; it never crashes, hangs or violates a sanitizer."""
    assert fuzz(build(variant).worker, seed=1000 * attacks, attacks=attacks) == []


def _libraries(worker: Path) -> dict[str, str]:
    """Paths of the shared libraries that the worker needs, by name."""
    ldd = program("ldd")
    if ldd is None:
        pytest.skip("ldd is not installed")
    listed = run([ldd, worker], timeout_s=_RUN_TIMEOUT_S).stdout
    found = dict(re.findall(r"^\s*(lib[\w+]+)\S* => (\S+)", listed, re.MULTILINE))
    assert found, listed
    return found


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
def test_worker_carries_its_runtimes(build: Callable[[str], Build]) -> None:
    assert set(_libraries(build("quick").worker)) <= {"libc", "libm", "libpthread", "libdl", "librt"}


_OLDEST_GLIBC = (2, 28)
"""Of manylinux_2_28, the wheel's platform (``tool.cibuildwheel`` in pyproject.toml), whose tag auditwheel verifies at a release."""
_ONCE_STATIC = {"fstat", "fstat64", "stat", "stat64"}
"""Functions that every glibc has, before 2.33 in libc_nonshared.a."""


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
def test_sources_need_no_newer_glibc_than_the_wheel(build: Callable[[str], Build]) -> None:
    """Libraries keep every version of a function, so the oldest one says since when it exists. The C++ runtime is the image's own."""
    nm = program("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    since: dict[str, tuple[int, ...]] = {}
    for path in _libraries(build("quick").worker).values():
        defined = run(
            [nm, "--dynamic", "--defined-only", "--with-symbol-versions", path], timeout_s=_RUN_TIMEOUT_S
        ).stdout
        for name, version in re.findall(r" (\w+)@+GLIBC_([\d.]+)$", defined, re.MULTILINE):
            numbers = tuple(int(number) for number in version.split("."))
            since[name] = min(numbers, since.get(name, numbers))
    objects = [path for path in build("quick").directory.rglob("*.o") if "zenflow-tests.dir" not in path.parts]
    undefined = run([nm, "--undefined-only", *objects], timeout_s=_RUN_TIMEOUT_S).stdout
    needed = set(re.findall(r"^\s+U (\w+)$", undefined, re.MULTILINE)) & set(since)
    assert "sched_setaffinity" in needed
    assert {name: since[name] for name in needed - _ONCE_STATIC if since[name] > _OLDEST_GLIBC} == {}


def test_without_a_compiler_cmake_says_what_to_install(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", CXX="/nonexistent/c++")
    assert result.returncode != 0
    assert "no C++ compiler was found" in result.stdout
    assert "apt-get install g++" in result.stdout
    assert "dnf install gcc-c++" in result.stdout


def test_unknown_sanitizer_is_refused(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", "-DZENFLOW_SANITIZE=adress")
    assert result.returncode != 0
    assert "'adress'" in result.stdout
