"""Result files: the documents show what the committed ones give; older names are understood; a failed process is reported."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import is_alive, wait_for

from benchmarks.common import results
from benchmarks.common.command_line import list_of, one_of
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import ROOT

SHOWN = {
    "convergence.__main__ --report-only": "convergence.md",
    "step_time.__main__ --report-only --name cpu_150M_1x16": "performance.md",
    "step_time.__main__ --report-only --name simulated_151M_asynchronous_1x16": "performance.md",
    "step_time.__main__ --report-only --name asynchronous_151M_540": "performance.md",
    "step_time.__main__ --report-only --name simulated_151M_540": "performance.md",
    "step_time.__main__ --report-only --name embedding_151M": "performance.md",
    "step_time.__main__ --report-only --name memory_50M": "performance.md",
    "step_time.bookkeeping --report-only": "performance.md",
    "kernel.__main__ --report-only": "performance.md",
}


@pytest.mark.parametrize(("command", "document"), SHOWN.items())
def test_the_document_has_what_the_results_give(
    command: str, document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in results.RESULTS.glob("*.json*"):
        shutil.copy(path, tmp_path)
    module, *arguments = command.split()
    assert importlib.import_module(f"benchmarks.{module}").main([*arguments, "--results", str(tmp_path)]) == 0
    printed, text = capsys.readouterr().out, (ROOT / "docs" / document).read_text()
    tables = [path.read_text().strip() for path in tmp_path.glob("*.md")]
    assert tables
    for table in tables:
        assert table in printed
        assert table in text, f"run python -m benchmarks.{command}"


def test_tables_go_between_their_markers() -> None:
    document = "before\n<!-- table a -->\nold\n<!-- end -->\nmiddle\n<!-- table b -->\nkept\n<!-- end -->\n"
    once = results.put_into_document(document, {"a": "new"})
    assert once == document.replace("old\n", "\nnew\n\n")
    assert results.put_into_document(once, {"a": "new"}) == once
    empty = "<!-- table a -->\n<!-- end -->\nmiddle\n<!-- table b -->\n<!-- end -->\n"
    filled = results.put_into_document(empty, {"a": "new"})
    assert filled.count("new") == 1 and "middle\n<!-- table b -->\n<!-- end -->\n" in filled


def test_former_names_are_understood() -> None:
    assert results.from_json('{"pace": [4, 1], "command": "--methods pace"}') == {
        "schedule": [4, 1],
        "command": "--methods pace",
    }
    assert list_of(one_of(["zenflow_no_provisional"], "method"))("zenflow_no_stand_in") == ["zenflow_no_provisional"]


def test_results_and_failures_of_processes() -> None:
    assert run_process(json.loads, "[1, 2]", timeout=60) == [1, 2]
    with pytest.raises(RuntimeError, match="(?s)no result .exit status 1, .*JSONDecodeError"):
        run_process(json.loads, "[", timeout=60)
    with pytest.raises(RuntimeError, match="no result .exit status -9, after at most 0.2 s"):
        run_process(json.loads, "[1, 2]", timeout=0.2)


def test_a_process_ends_with_a_benchmark_that_is_killed() -> None:
    call = "import os; from benchmarks.common.processes import run_process; run_process(os.execvp, 'sleep', ['sleep', '100'], timeout=100)"
    benchmark = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT)
    children = psutil.Process(benchmark.pid).children
    wait_for(lambda: any(child.cmdline() == ["sleep", "100"] for child in children()))
    (child,) = children()
    benchmark.kill()
    benchmark.wait()
    wait_for(lambda: not is_alive(child.pid))
