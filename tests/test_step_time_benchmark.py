"""The step-time benchmark: a smoke run on the simulated accelerator, and its arithmetic."""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import kernel, step_time
from benchmarks.accelerator import SHAPES, Gpt, SimulatedAccelerator
from benchmarks.step_report import percentile, table
from benchmarks.step_run import StepResult, StepSpec


def spec(method: str) -> StepSpec:
    return StepSpec(
        device="simulated", method=method, params=8e6, batch=1, tokens=16, compute_s=0.02, warm_up=3, steps=4
    )


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--params", "8e6", "--compute-ms", "20", "--repeats", "1", "--steps", "4"]
    arguments += ["--warm-up", "3", "--methods", "floor,zenflow", "--results", str(tmp_path), "--name", "smoke"]
    assert step_time.main(arguments) == 0, capsys.readouterr().out
    written = json.loads((tmp_path / "step_time_smoke.json").read_text())
    floor, ours = written["runs"][0]
    assert len(ours["step_s"]) == len(floor["step_s"]) == 4
    assert min(ours["step_s"]) >= 0.02
    assert ours["pace"] == [4, 1]
    assert max(ours["worker_s"]) > 0
    assert ours["host_bytes"] > 16 * 4e6
    assert ours["n_params"] == 4096 * 1024
    text = (tmp_path / "step_time_smoke.md").read_text()
    assert "ours, S=4, d=1" in text and "benchmarks.step_time" in text
    assert (tmp_path / "step_time_smoke.png").stat().st_size > 1000


def test_a_failed_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--repeats", "1", "--methods", "floor", "--timeout", "0.2"]
    assert step_time.main([*arguments, "--results", str(tmp_path)]) == 1
    assert "FAILED: no result" in capsys.readouterr().out


def test_table_by_hand() -> None:
    def result(method: str, step_s: list[float], **values: object) -> StepResult:
        return StepResult(spec=spec(method), step_s=step_s, host_bytes=10**9, **values)  # type: ignore[arg-type]

    ours = {"stall_s": [0.1, 0.0], "worker_s": [0.5, 0.5], "pace": [4, 1]}
    repeats = [
        [result("floor", [1.0, 1.0]), result("zero_offload", [2.0, 4.0]), result("zenflow", [1.0, 1.5], **ours)],
        [result("floor", [1.0, 1.0]), result("zero_offload", [2.0, 4.0]), result("zenflow", [1.0, 1.5], **ours)],
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(repeats).splitlines()]
    rows = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    row = rows["ours, S=4, d=1"]
    assert (row["mean ms"], row["median ms"], row["above floor ms"]) == ("1250", "1250", "250")
    assert (row["speed of floor"], row["time / zero_offload"]) == ("80%", "0.42")
    assert (row["waiting"], row["worker ms"], row["S, d"], row["host GB"]) == ("4.0%", "500", "4, 1", "1.00")
    assert rows["floor: gradients dropped, no step"]["waiting"] == ""


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile([7.0], 0.99) == 7.0


def test_models_have_the_size_they_are_named_by() -> None:
    for params in (25e6, 150e6):
        with torch.device("meta"):
            model = Gpt(steps=1, params=params, batch=1, tokens=16)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.15)
    assert set(SHAPES) >= {25e6, 150e6, 1.5e9, 3e9}
    with torch.device("meta"):
        simulated = SimulatedAccelerator(steps=1, params=151e6, compute_s=0.1)
    assert len(simulated.weights) == 36


def test_kernel_benchmark(tmp_path: Path) -> None:
    triad, rounds = kernel.measure_replay(1 << 16, sorted(os.sched_getaffinity(0))[:1])
    assert triad > 0
    assert sorted(rounds) == [1, 2, 4, 8, 16]
    assert min(rounds.values()) > 0
