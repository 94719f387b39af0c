"""Result files: the tables are what the committed measurements give; a failed process is reported."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.processes import is_alive, wait_for

from benchmarks.common import results
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import ROOT

TABLES = {
    "convergence.__main__ --report-only",
    *(f"step_time.__main__ --report-only --name {path.stem[10:]}" for path in results.RESULTS.glob("step_time_*.json")),
    "step_time.bookkeeping --report-only",
    "kernel.__main__ --report-only",
    "saves.__main__ --report-only",
}


@pytest.mark.parametrize("command", sorted(TABLES))
def test_tables_are_what_the_results_give(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in results.RESULTS.glob("*.json*"):
        shutil.copy(path, tmp_path)
    module, *arguments = command.split()
    assert importlib.import_module(f"benchmarks.{module}").main([*arguments, "--results", str(tmp_path)]) == 0
    printed, written = capsys.readouterr().out, list(tmp_path.glob("*.md"))
    assert written
    for path in written:
        assert path.read_text() == (results.RESULTS / path.name).read_text(), f"run python -m benchmarks.{command}"
        assert path.read_text().strip() in printed


FORKS = pytest.mark.parametrize("forks", [False, True])


@FORKS
def test_results_and_failures_of_processes(forks: bool) -> None:
    assert run_process(json.loads, "[1, 2]", timeout=60, forks=forks) == [1, 2]
    with pytest.raises(RuntimeError, match="(?s)no result .exit status 1, .*JSONDecodeError"):
        run_process(json.loads, "[", timeout=60, forks=forks)
    with pytest.raises(RuntimeError, match="no result .exit status -9, after at most 0.2 s"):
        run_process(time.sleep, 60, timeout=0.2, forks=forks)


@FORKS
def test_a_process_ends_with_a_benchmark_that_is_killed(forks: bool) -> None:
    call = f"run_process(os.execvp, 'sleep', ['sleep', '100'], timeout=100, forks={forks})"
    call = f"import os; from benchmarks.common.processes import run_process; {call}"
    benchmark = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT)
    children = partial(psutil.Process(benchmark.pid).children, recursive=True)
    wait_for(lambda: any(child.cmdline() == ["sleep", "100"] for child in children()))
    (child,) = (child for child in children() if child.cmdline() == ["sleep", "100"])
    benchmark.kill()
    benchmark.wait()
    wait_for(lambda: not is_alive(child.pid))
