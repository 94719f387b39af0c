"""Result files: every stored record has its table; a failed process is reported."""

import importlib
import json
import re
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.common.processes import run_process
from benchmarks.glue import __main__ as glue
from benchmarks.glue.methods import METHODS as GLUE_METHODS
from benchmarks.glue.run import Record
from benchmarks.step_time.methods import METHODS

MODULES = {
    "convergence*.jsonl": "convergence",
    "kernel*.json": "kernel",
    "saves*.json": "saves",
    "step_time*.json": "step_time",
}
RECORDS = [(module, path) for pattern, module in MODULES.items() for path in sorted(results.RESULTS.glob(pattern))]


@pytest.mark.parametrize(("module", "path"), RECORDS, ids=[path.stem for _, path in RECORDS])
def test_a_record_has_its_table(module: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"benchmarks.{module}.__main__").main
    assert main(["--report-only", "--name", path.stem]) == 0
    printed = capsys.readouterr().out
    # Of runs that were repeated the last one counts.
    assert any(commit in printed for commit in re.findall(r'"commit": "([\w+]+)"', path.read_text()))
    if module == "step_time":
        methods = re.findall(r'"method": "(\w+)"', path.read_text())
        assert all(METHODS[method].title in printed for method in methods)


def test_every_record_is_known() -> None:
    assert {path for _, path in RECORDS} == {*results.RESULTS.glob("*.json*")}


def test_the_report_on_glue_has_every_stored_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in results.RESULTS.rglob("glue"):
        shutil.copytree(folder, tmp_path / folder.parent.name / "glue")
        assert glue.main(["--report-only", "--results", str(tmp_path / folder.parent.name)]) == 0
        printed = capsys.readouterr().out
        for run in (Record(**json.loads(file.read_text())) for file in folder.glob("*.json")):
            if run.error is not None:
                assert f"{run.name}: {run.error}" in printed
                continue
            of_task = printed.partition(f"{run.task}\n\n")[2].partition("\n\n")[0]
            (row,) = (line for line in of_task.splitlines() if f"| {GLUE_METHODS[run.method].title} " in line)
            assert f"{run.lr:g}: " in row and run.commit in printed


@pytest.mark.parametrize("forks", [False, True])
def test_results_and_failures_of_processes(forks: bool) -> None:
    assert run_process(json.loads, "[1, 2]", timeout=60, forks=forks) == [1, 2]
    with pytest.raises(RuntimeError, match="(?s)no result .exit status 1, .*JSONDecodeError"):
        run_process(json.loads, "[", timeout=60, forks=forks)
    with pytest.raises(RuntimeError, match="no result .exit status -9, after at most 0.2 s"):
        run_process(time.sleep, 60, timeout=0.2, forks=forks)
