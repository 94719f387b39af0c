"""The C++ tests of ``tests/cpp`` and a fuzzer of the worker, in a quick build; as released and with sanitizers where `slow` is selected."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

import cpp_build
from cpp_build import BUILD_TIMEOUT_S, VARIANTS, configure, program, run
from worker_fuzzer import fuzz

_RUN_TIMEOUT_S = 600
_SKIPPED = {
    # It single-steps the released worker; other builds would execute many times as many instructions.
    **{variant: ["-kill"] for variant in VARIANTS if variant != "release"},
    "thread": ["-kill", "-half", "-stochastic_rounding", "-replay_adamw", "-device_kernels", "-arena"],
}
"""Groups of tests that a variant leaves out: for "thread" those without threads."""

pytestmark = pytest.mark.timeout(2 * BUILD_TIMEOUT_S)


@cache
def folder_of(variant: str) -> Path:
    """The built variant; skips the test if this machine lacks its sanitizer, or has an address space layout that it does not support."""
    if variant in ("address", "thread"):
        probe = [os.environ.get("CXX", "c++"), f"-fsanitize={variant}", "-x", "c++", "-", "-o", "/dev/null"]
        if run(["sh", "-c", f"echo 'int main() {{}}' | {' '.join(probe)}"], timeout_s=BUILD_TIMEOUT_S).returncode != 0:
            pytest.skip(f"the compiler has no {variant} sanitizer")
    folder = cpp_build.build(variant)
    if (
        variant == "thread"
        and "FATAL" in run([folder / "zenflow-worker", "--version"], timeout_s=_RUN_TIMEOUT_S).stdout
    ):
        pytest.skip("the thread sanitizer does not run on this machine")
    return folder


@pytest.mark.parametrize("variant", ["quick", *(pytest.param(v, marks=pytest.mark.slow) for v in list(VARIANTS)[1:])])
def test_cpp(variant: str) -> None:
    result = run(
        [folder_of(variant) / "tests" / "zenflow-tests", *_SKIPPED.get(variant, [])],
        timeout_s=_RUN_TIMEOUT_S,
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


@pytest.mark.parametrize(("variant", "attacks"), [("quick", 40), pytest.param("address", 5000, marks=pytest.mark.slow)])
def test_broken_arenas_and_messages(variant: str, attacks: int) -> None:
    """The worker answers, or reports an error and exits with 1; it never crashes, hangs or violates a sanitizer."""
    assert fuzz(folder_of(variant) / "zenflow-worker", seed=1000 * attacks, attacks=attacks) == []


def test_the_worker_needs_no_other_libraries_than_the_c_library() -> None:
    """The C++ runtime is the image's own. How old the C library may be says auditwheel, at a release."""
    if (ldd := program("ldd")) is None:
        pytest.skip("ldd is not installed")
    listed = run([ldd, folder_of("quick") / "zenflow-worker"], timeout_s=_RUN_TIMEOUT_S).stdout
    libraries = set(re.findall(r"^\s*(lib[\w+]+)\S* => ", listed, re.MULTILINE))
    assert {"libc"} <= libraries <= {"libc", "libm", "libpthread", "libdl", "librt"}


def test_what_cmake_says(tmp_path: Path) -> None:
    without_compiler = configure(tmp_path / "1", CXX="/nonexistent/c++")
    assert without_compiler.returncode != 0
    for part in ("no C++ compiler was found", "apt-get install g++", "dnf install gcc-c++"):
        assert part in without_compiler.stdout
    misspelt = configure(tmp_path / "2", "-DZENFLOW_SANITIZE=adress")
    assert misspelt.returncode != 0 and "'adress'" in misspelt.stdout
