"""scripts/gpu as far as a CPU shows it: calls go on where the last one stopped; what a bare machine gets; tiny cases of all it runs."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import provenance
from benchmarks.common.processes import run_command
from benchmarks.gpu import bench, calls, pack, suite
from benchmarks.gpu.calls import Calls
from benchmarks.step_time.run import StepResult, StepSpec

Open = Callable[..., Calls]


@pytest.fixture
def open_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the same file again and again, without a process that describes the machine."""
    monkeypatch.setattr(calls, "run_process", lambda describe, *arguments, timeout: describe(*arguments))
    defaults: dict[str, Any] = {"command": "scripts/gpu", "device": "cpu", "minutes": 8}
    return lambda **options: Calls(tmp_path / "folder" / "results.json", **{**defaults, **options})


def test_results_of_former_calls(open_calls: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_calls()
    first.put("a", {"value": 1})
    second = open_calls(minutes=0)
    assert second.left() <= 0 < first.left()
    second.put("b", {"value": 2})
    open_calls(joins=True).put("c", {"value": 3})
    assert open_calls().done == {name: {"call": min(i, 1), "value": i + 1} for i, name in enumerate("abc")}
    (call, _) = open_calls().calls
    assert call["machine"]["logical_cores"] > 0 and {"commit", "date", "versions"} <= {*call}
    assert not open_calls(again=True).done and not open_calls(device="cuda").done
    monkeypatch.setattr(calls, "commit_of_code", lambda _: "another")
    assert not open_calls().done


def test_bench_goes_on_and_reports(
    open_calls: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With measurements that are given: two calls, of which the first is cut in its third run; one run fails."""
    measured: list[str] = []
    options = argparse.Namespace(device="cpu")

    def run_process(_: Any, spec: StepSpec, *, timeout: float, forks: bool) -> StepResult:
        measured.append(spec.method)
        if len(measured) == 2:
            raise RuntimeError("out of memory")
        if len(measured) == 3:
            cut.deadline = 0
            raise RuntimeError("killed")
        losses = [2.0 if spec.method == "none" else 2.5] * spec.total_steps
        return StepResult(spec=spec, step_s=[0.5] * spec.steps, losses=losses, n_params=1)

    monkeypatch.setattr(bench, "run_process", run_process)
    cut = open_calls()
    assert bench.run_bench(options, cut) == 1
    assert "4 runs are left: call again" in capsys.readouterr().out
    assert bench.run_bench(options, open_calls()) == 1  # the failed run stays failed
    assert measured == ["floor", "zenflow", "none", "none", "zenflow_exact", "floor3", "zenflow3"]
    text = cut.path.with_suffix(".md").read_text()
    assert "failed\n\n```\nout of memory" in text and "killed" not in text
    assert "| 2.5000   | 0.5000               | 0.5000            |" in text
    assert bench.run_bench(options, open_calls()) == 1 and len(measured) == 7


@pytest.mark.slow
def test_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in {"PACK": tmp_path / "pack", "PACKED": tmp_path / "pack" / "packed.json"}.items():
        monkeypatch.setattr(pack, name, path)
    pack.pack("3.12")
    wheels = {path.name.partition("-")[0] for path in pack.PACK.glob("*.whl")}
    assert {"deepspeed", "hjson", "omegaconf", "psutil", "ninja", "pydantic_core", "torchao"} <= wheels
    assert sum(path.stat().st_size for path in pack.PACK.iterdir()) < 30e6
    assert pack.find_worker() == pack.PACK / "zenflow-worker"


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--device", "cpu"]
    return subprocess.run(command, cwd=provenance.ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bench", "train"])
def test_all_of_it_on_the_cpu(what: str, tmp_path: Path) -> None:
    done = call(what, "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    if what == "bench":
        text = (tmp_path / "bench.md").read_text()
        assert "ZenFlowStrategy, S=4, d=1" in text and "largest difference" in text
        assert "floor: stage 3" in text and "ZenFlowStrategy, stage 3" in text and "failed" not in text
    else:
        steps = json.loads((tmp_path / "training.json").read_text())["done"]["training"]["steps_loss_ms"]
        assert [step for step, _, _ in steps] == [1, 2, 3, 4]


def test_the_suite_has_all_files_with_tests_for_a_gpu() -> None:
    """But for the examples, whose packages a bare machine lacks."""
    root = Path(__file__).parents[2]
    files = {file for file in (root / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()} - {Path(__file__)}
    names = {file.relative_to(root).as_posix() for file in files}
    assert {name for name in names if not name.startswith(("tests/examples", *suite.FILES))} == set()
    assert all((root / name).exists() for name in suite.FILES)


def test_a_test_that_ends_its_process_has_failed(open_calls: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As xdist reports it; the process that it starts instead collects the same tests as the others."""
    monkeypatch.setenv(suite._DEADLINE, "inf")
    first = open_calls()
    first.begin()
    record = suite._Record(first)
    place: dict[str, Any] = {"nodeid": "test_it", "location": ("test_it.py", None, "test_it"), "keywords": {}}
    for phase, outcome, text in (("setup", "passed", None), ("???", "failed", "worker 'gw0' crashed")):
        report = pytest.TestReport(**place, when=phase, outcome=outcome, longrepr=text)  # type: ignore[arg-type]
        record.pytest_runtest_logreport(report)
    result = open_calls().done["test_it"]
    assert result["outcome"] == "failed" and "crashed" in result["text"]
    assert not suite._Left(open_calls(joins=True))._done
    open_calls().begin()
    assert suite._Left(open_calls(joins=True))._done == {"test_it"}


@pytest.mark.slow
def test_tests_over_several_calls(tmp_path: Path) -> None:
    """The first call's time is over when its first test ends."""
    file = tmp_path / "test_it.py"
    file.write_text("def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass\n")
    first = Calls(tmp_path / "tests.json", command="first", device="cpu", minutes=8)
    first.begin()
    environment = suite.environment_of(first, command="first", device="cpu", deadline=0.0)
    assert run_command(suite.command_of("cpu", [str(file)]), timeout=300, environment=environment) == suite.TIME_IS_OVER
    for _ in range(2):
        done = call("tests", "--results", str(tmp_path), str(file))
        assert done.stdout.splitlines()[-1].endswith("tests.json: 2 passed, 1 failed, 0 skipped; complete")
        assert done.returncode == 1
    results = Calls(first.path, command="", device="cpu", minutes=0).done.values()
    assert [(result["call"], result["outcome"]) for result in results] == [(0, "passed"), (1, "failed"), (1, "passed")]
