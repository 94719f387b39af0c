"""The tests that need a GPU, over several calls. A plugin of pytest too (`-p benchmarks.gpu.suite`)."""

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.common.cpu_adam import compile_cpu_adam
from benchmarks.common.processes import run_command
from benchmarks.gpu.calls import Calls

FILES = ("tests/gpu", "tests/unit/kernels")
_ALONE = "tests/gpu/test_gpu_memory.py"
"""Of them: its tests use most of the device's memory."""
_LONGEST_TEST = 150
"""Seconds. In the last third of that, no test is started: most take seconds."""
TIME_IS_OVER = 75
"""Exit status."""
_PATH, _COMMAND, _DEVICE, _DEADLINE = (f"ZENFLOW_SUITE_{name}" for name in ("PATH", "COMMAND", "DEVICE", "DEADLINE"))


def command_of(device: str, arguments: Sequence[str]) -> list[str]:
    """Command that runs tests with this plugin."""
    options = ["-q", "-p", "benchmarks.gpu.suite", f"--timeout={_LONGEST_TEST}"]
    marker = ["-m", "gpu"] if device == "cuda" else []
    return [sys.executable, "-m", "pytest", *options, *marker, *(arguments or FILES)]


def _parts(device: str, arguments: Sequence[str]) -> list[Sequence[str]]:
    """Arguments of one command after the other: where there are cores for it, tests run side by side, but for those of `_ALONE`."""
    processes = len(os.sched_getaffinity(0)) * 3 // 4
    if arguments or device == "cpu" or processes < 4 or importlib.util.find_spec("xdist") is None:
        return [arguments]
    return [[f"--numprocesses={processes}", "--dist=worksteal", f"--ignore={_ALONE}", *FILES], [_ALONE]]


def environment_of(calls: Calls, *, command: str, device: str, deadline: float) -> dict[str, str]:
    """Variables by which the plugin knows where its results belong, and when it starts no more tests (seconds as of `time.time`)."""
    known = {_PATH: str(calls.path), _COMMAND: command, _DEVICE: device, _DEADLINE: str(deadline)}
    # Triton is imported with this plugin, before the tests say how: without a GPU by its interpreter.
    how = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    # For torch's deterministic algorithms.
    return {**known, **how, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_tests(options: argparse.Namespace, calls: Calls) -> int:
    """Runs what no call has finished; the exit status is 0 if every test has passed or was skipped."""
    # Beside the tests, one of which waits for it.
    compilation = Thread(target=compile_cpu_adam)
    if options.device == "cuda":
        compilation.start()
    calls.begin()
    environment = environment_of(
        calls, command=options.command, device=options.device, deadline=calls.deadline - _LONGEST_TEST / 3
    )
    any_failed = False
    for arguments in _parts(options.device, options.arguments):
        print(
            f"runs pytest {' '.join(arguments or FILES)}; its first line comes when the tests are collected", flush=True
        )
        status = run_command(command_of(options.device, arguments), timeout=calls.left(), environment=environment)
        # No tests are collected where nothing is left to be run.
        complete = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if not complete:
            break
        any_failed |= status == pytest.ExitCode.TESTS_FAILED
    done = Calls(calls.path, command=options.command, device=options.device, minutes=0).done
    outcomes = [result["outcome"] for result in done.values()]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
    cut = "call again for the rest" if status in (TIME_IS_OVER, -signal.SIGKILL) else f"pytest ended with {status}"
    print(f"{calls.path}: {counts}; {'complete' if complete else cut}", flush=True)
    return 0 if complete and not any_failed and "failed" not in outcomes else 1


class _Left:
    """Leaves out tests that have a result of a former call: what is started in place of a process that crashed collects the same."""

    def __init__(self, calls: Calls) -> None:
        self._done = {name for name, result in calls.done.items() if result["call"] < len(calls.calls) - 1}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._done])
        items[:] = [item for item in items if item.nodeid not in self._done]


class _Record:
    """Records the results of tests, and ends when the time is over."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._deadline = float(os.environ[_DEADLINE])
        self._results: dict[str, dict[str, Any]] = {}
        """Of the tests that are under way."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._results.setdefault(report.nodeid, {"seconds": 0.0})
        result["seconds"] = round(result["seconds"] + report.duration, 2)
        if report.when == "call" or report.outcome != "passed":
            result["outcome"] = report.outcome
        if report.outcome != "passed":
            result["text"] = report.longreprtext[-4000:]
        # A test that crashes its process has one report of no phase, and no teardown.
        if report.when not in ("setup", "call"):
            self._calls.put(report.nodeid, self._results.pop(report.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.time() > self._deadline:
            pytest.exit("the time of this call is over", returncode=TIME_IS_OVER)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin; a process that xdist has started collects what is left, and the one that started it records."""
    path, command, device = (os.environ[name] for name in (_PATH, _COMMAND, _DEVICE))
    calls = Calls(Path(path), command=command, device=device, minutes=0, joins=True)
    config.pluginmanager.register(_Left(calls))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(calls))
