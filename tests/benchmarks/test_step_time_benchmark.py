"""The benchmarks of step times, bookkeeping and the kernel: a smoke run of each, and their arithmetic."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.kernel.measure import measure_replay
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time import bookkeeping
from benchmarks.step_time.copied_bytes import copied_bytes
from benchmarks.step_time.report import table
from benchmarks.step_time.run import StepResult, StepSpec
from docs.quote_tables import rows_of


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--params", "8e6", "--compute-ms", "20", "--repeats", "1", "--steps", "4"]
    arguments += ["--warm-up", "3", "--methods", "floor,zenflow", "--results", str(tmp_path), "--name", "smoke"]
    assert step_time.main(arguments) == 0, capsys.readouterr().out
    written = json.loads((tmp_path / "step_time_smoke.json").read_text())
    floor, zenflow = written["runs"][0]
    assert len(zenflow["step_s"]) == len(floor["step_s"]) == 4
    assert min(zenflow["step_s"]) >= 0.02 and max(zenflow["worker_s"]) > 0
    assert zenflow["schedule"] == [4, 1] and zenflow["host_bytes"] > 16 * 4e6
    # Traffic that would cross PCIe: the gradients, a quarter of the weights, and less than that for columns.
    d2h, h2d = zenflow["counted_sizes"]
    assert d2h == pytest.approx(1, abs=0.01) and 0.24 < h2d < 1
    assert zenflow["copied_sizes"] == floor["copied_sizes"] == floor["counted_sizes"] == []
    text = (tmp_path / "step_time_smoke.md").read_text()
    assert "ZenFlowStrategy, S=4, d=1" in text and "benchmarks.step_time" in text


def test_table_by_hand() -> None:
    def result(method: str, step_s: list[float], **values: object) -> StepResult:
        spec = StepSpec(device="simulated", method=method, params=8e6, warm_up=3, steps=4)
        return StepResult(spec=spec, step_s=step_s, host_bytes=10**9, **values)  # type: ignore[arg-type]

    zenflow = {"stall_s": [0.1, 0.0], "worker_s": [0.5, 0.5], "schedule": [4, 1]}
    floor = result("floor", [1.0, 1.0])
    repeat = [floor, result("zero_offload", [2.0, 4.0]), result("zenflow", [1.0, 1.5], **zenflow)]
    rows = {row["method"]: row for row in rows_of(table([repeat, repeat]))}
    row = rows["ZenFlowStrategy, S=4, d=1"]
    assert (row["mean ms"], row["median ms"], row["above floor ms"]) == ("1250", "1250", "250")
    assert (row["speed of floor"], row["time / zero_offload"]) == ("80%", "0.42")
    assert (row["waiting"], row["worker ms"], row["S, d"], row["host GB"]) == ("4.0%", "500", "4, 1", "1.00")
    assert rows["floor: gradients dropped, no step"]["waiting"] == ""
    assert "d2h" not in row
    by_counters = result("zenflow", [1.0], **zenflow, counted_sizes=[1.0, 0.26])
    assert ["1.00", "0.26"] in [[row["d2h"], row["h2d"]] for row in rows_of(table([[floor, by_counters]]))]
    by_profiler = result("zenflow", [1.0], **zenflow, counted_sizes=[1.0, 0.26], copied_sizes=[1.01, 0.27])
    found = {row["method"]: (row["d2h"], row["h2d"]) for row in rows_of(table([[floor, by_profiler]]))}
    assert found == {"floor: gradients dropped, no step": ("", ""), "ZenFlowStrategy, S=4, d=1": ("1.01", "0.27")}


def test_kernel_benchmark() -> None:
    triad, jobs = measure_replay(1 << 16, sorted(os.sched_getaffinity(0))[:1])
    assert triad > 0
    assert {job.steps for job in jobs.values()} == {1, 2, 4, 8, 16}
    assert jobs["replay, S=4"].n_bytes == 34
    assert jobs["one behind, S=1"].n_bytes == 30
    assert jobs["one behind, bfloat16 moments, S=1"].n_bytes == 22
    assert min(job.ns for job in jobs.values()) > 0


def test_bytes_of_a_trace() -> None:
    """A trace as of torch's profiler on CUDA: copies on the device, kernels and host events are no traffic."""
    names = {
        "Memcpy DtoH (Device -> Pinned)": ("gpu_memcpy", 1000),
        "Memcpy DtoH (Device -> Pageable)": ("gpu_memcpy", 4),
        "Memcpy HtoD (Pinned -> Device)": ("gpu_memcpy", 200),
        "Memcpy DtoD (Device -> Device)": ("gpu_memcpy", 30_000),
        "Memset (Device)": ("gpu_memset", 30_000),
        "Memcpy HtoD of a user": ("user_annotation", 30_000),
    }
    events = [{"ph": "X", "cat": cat, "name": name, "args": {"bytes": n}} for name, (cat, n) in names.items()]
    events += [{"ph": "M", "name": "process_name", "args": {}}, {"ph": "X", "cat": "kernel", "name": "f", "args": {}}]
    assert copied_bytes(events) == (1004, 200)
    assert copied_bytes([]) == (0, 0)


def test_bookkeeping(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The smoke run of the times of steps has a process for each run.
    monkeypatch.setattr(bookkeeping, "run_process", lambda function, spec, **_: function(spec))
    arguments = ["--params", "25e6", "--methods", "floor,zenflow", "--repeats", "1", "--steps", "5", "--own-steps", "2"]
    assert bookkeeping.main([*arguments, "--results", str(tmp_path)]) == 0
    (repeat,) = json.loads((tmp_path / "bookkeeping.json").read_text())["repeats"]
    assert [len(step_s) for step_s in repeat.values()] == [5, 5, 2]
    assert min(min(step_s) for step_s in repeat.values()) > 0
    text = (tmp_path / "bookkeeping.md").read_text()
    assert text.strip() in capsys.readouterr().out and "ZenFlowStrategy, S=4, d=1" in text
