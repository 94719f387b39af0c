"""Every benchmark but that of convergence in a small setting: it runs, and writes what it has measured."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.processes import run_process
from benchmarks.kernel.__main__ import measure_replay
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time.run import StepResult, StepSpec


@pytest.mark.slow
def test_step_time_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--params", "13e6", "--asynchronous", "--ranks", "2"]
    arguments += ["--worker-shares", "0.5,0.1"]
    arguments += ["--repeats", "1", "--steps", "4", "--warm-up", "2", "--methods", "zenflow_exact,zenflow_module_order"]
    assert step_time.main([*arguments, "--results", str(tmp_path), "--name", "ranks"]) == 0, capsys.readouterr().out
    runs = json.loads((tmp_path / "ranks.json").read_text())["runs"][0]
    assert [run["spec"]["method"] for run in runs] == 2 * ["zenflow_exact", "zenflow_module_order"]
    assert runs[2]["spec"]["compute_s"] == pytest.approx(5 * runs[0]["spec"]["compute_s"])
    for run in runs:
        assert len(run["stall_s"]) == 4 and run["counted_sizes"] == pytest.approx([0.5, 0.5], rel=0.01)


@pytest.mark.slow
def test_step_time_of_stage_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fetches over a slow link take longer than what is computed."""
    arguments = ["--device", "simulated", "--params", "17e6", "--asynchronous", "--stage", "3", "--share-of", "step"]
    arguments += ["--worker-shares", "0.5", "--repeats", "1", "--steps", "4", "--warm-up", "4", "--pcie", "0.2"]
    arguments += ["--methods", "floor3,zenflow3,zenflow3_clipped", "--results", str(tmp_path), "--name", "stage_3"]
    assert step_time.main(arguments) == 0
    text = capsys.readouterr().out
    runs = json.loads((tmp_path / "stage_3.json").read_text())["runs"][0]
    # Of four layers, the last one is fetched once for both passes.
    fetched_s = 7 * 2 * 4096 * 1024 / 0.2e9
    for run in runs:
        assert min(run["step_s"]) >= fetched_s > run["spec"]["compute_s"]
    assert runs[1]["counted_sizes"] == pytest.approx([1, 7 / 4], abs=0.01)
    assert runs[1]["arena_bytes"] / runs[1]["n_params"] == pytest.approx(16.7, abs=0.2)
    assert "The worker's pass is 50% of step" in text and "by formula" in text


@pytest.mark.slow
def test_fsdp2_with_its_optimizer_in_host_memory_is_adamw() -> None:
    """Beside DeepSpeed's AdamW without offload, on text, with steps that clip."""
    options: dict[str, Any] = {"params": 25e6, "batch": 2, "narrow": True, "text": True, "warm_up": 2, "steps": 6}
    specs = [StepSpec(device="cpu", method=method, **options) for method in ("none", "fsdp2")]
    without, fsdp2 = (run_process(step_time.run, spec, timeout=250).losses for spec in specs)
    assert fsdp2 == pytest.approx(without, rel=1e-5) and len({*fsdp2}) == len(fsdp2) == 8


def test_what_a_device_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_time, "run_process", lambda _, spec, timeout: StepResult(spec=spec, step_s=[0.5]))
    assert step_time.main(["--device", "cpu", "--methods", "none", "--repeats", "1", "--results", str(tmp_path)]) == 0
    assert "not on this device: torchao CPUOffloadOptimizer" in capsys.readouterr().out


def test_kernel() -> None:
    triad, jobs = measure_replay(1 << 16, sorted(os.sched_getaffinity(0))[:1])
    assert triad > 0
    assert {job.steps for job in jobs.values()} == {1, 2, 4, 8, 16}
    assert min(job.ns for job in jobs.values()) > 0


def test_bookkeeping(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The times of steps are measured with a process for each run.
    monkeypatch.setattr(step_time, "run_process", lambda function, spec, **_: function(spec))
    arguments = ["--device", "cpu", "--params", "25e6", "--narrow", "--methods", "floor,zenflow", "--repeats", "1"]
    assert step_time.main([*arguments, "--steps", "5", "--warm-up", "2", "--results", str(tmp_path)]) == 0
    (repeat,) = json.loads((tmp_path / "step_time.json").read_text())["runs"]
    assert [len(run["step_s"]) for run in repeat] == [5, 5]
    assert all(run["n_params"] < 1e6 and min(run["step_s"]) > 0 for run in repeat)
    text = capsys.readouterr().out
    assert "above floor ms" in text and "ZenFlowStrategy, S=4, d=1" in text
