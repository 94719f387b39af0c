"""The tests that need a GPU, one after the other over several calls. A plugin of pytest too (`-p benchmarks.gpu.suite`)."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.cpu_adam import compile_cpu_adam
from benchmarks.common.processes import run_command
from benchmarks.gpu.calls import Calls

FILES = ("tests/gpu", "tests/unit/kernels")
_LONGEST_TEST = 150
"""Seconds. In the last third of that, no test is started: most take seconds."""
TIME_IS_OVER = 75
"""Exit status."""
_PATH, _COMMAND, _DEVICE, _DEADLINE = (f"ZENFLOW_SUITE_{name}" for name in ("PATH", "COMMAND", "DEVICE", "DEADLINE"))


def command_of(device: str, arguments: Sequence[str]) -> list[str]:
    """Command that runs the tests with this plugin."""
    options = ["-q", "-p", "benchmarks.gpu.suite", f"--timeout={_LONGEST_TEST}"]
    marker = ["-m", "gpu"] if device == "cuda" else []
    return [sys.executable, "-m", "pytest", *options, *marker, *(arguments or FILES)]


def environment_of(calls: Calls, *, command: str, device: str, deadline: float) -> dict[str, str]:
    """Variables by which the plugin knows where its results belong, and when it starts no more tests (seconds as of `time.time`)."""
    known = {_PATH: str(calls.path), _COMMAND: command, _DEVICE: device, _DEADLINE: str(deadline)}
    # For torch's deterministic algorithms.
    return {**known, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_tests(options: argparse.Namespace, calls: Calls) -> int:
    """Runs what no call has finished; the exit status is 0 if every test has passed or was skipped."""
    if options.device == "cuda":
        compile_cpu_adam()
    calls.begin()
    environment = environment_of(
        calls, command=options.command, device=options.device, deadline=calls.deadline - _LONGEST_TEST / 3
    )
    status = run_command(command_of(options.device, options.arguments), timeout=calls.left(), **environment)
    done = Calls(calls.path, command=options.command, device=options.device, minutes=0).done
    outcomes = [result["outcome"] for result in done.values()]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
    # No tests are collected where nothing is left to be run.
    complete = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    cut = "call again for the rest" if status in (TIME_IS_OVER, -signal.SIGKILL) else f"pytest ended with {status}"
    print(f"{calls.path}: {counts}; {'complete' if complete else cut}", flush=True)
    return 0 if complete and "failed" not in outcomes else 1


class _Resume:
    """Leaves out tests that have a result, records the others', and starts none when the time is over."""

    def __init__(self) -> None:
        path, command, device = (os.environ[name] for name in (_PATH, _COMMAND, _DEVICE))
        self._calls = Calls(Path(path), command=command, device=device, minutes=0, joins=True)
        self._deadline = float(os.environ[_DEADLINE])
        self._result: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = self._calls.done
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = round(self._result.get("seconds", 0.0) + report.duration, 2)
        if report.when == "call" or report.outcome != "passed":
            self._result |= {"outcome": report.outcome}
        if report.outcome != "passed":
            self._result["text"] = report.longreprtext[-4000:]
        self._result["seconds"] = seconds
        if report.when == "teardown":
            self._calls.put(report.nodeid, self._result)
            self._result = {}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.time() > self._deadline:
            pytest.exit("the time of this call is over", returncode=TIME_IS_OVER)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    config.pluginmanager.register(_Resume())
