"""scripts/gpu as far as a CPU shows it: what a bare machine gets; tiny cases of all it runs; tests over several calls."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import provenance
from benchmarks.common.processes import run_command
from benchmarks.gpu import pack, suite
from benchmarks.gpu.calls import Calls


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
