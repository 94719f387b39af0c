"""The step-time benchmark: a smoke run on the simulated accelerator, and its arithmetic."""

import inspect
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.kernel.measure import measure_replay
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time.copied_bytes import copied_bytes
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.models import SHAPES, SimulatedAccelerator, TimedGpt
from benchmarks.step_time.report import percentile, table
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
    assert min(zenflow["step_s"]) >= 0.02
    assert zenflow["schedule"] == [4, 1]
    assert max(zenflow["worker_s"]) > 0
    assert zenflow["host_bytes"] > 16 * 4e6
    assert zenflow["n_params"] == 4096 * 1024
    # Traffic that would cross PCIe: the gradients, a quarter of the weights, and less than that for columns.
    d2h, h2d = zenflow["counted_sizes"]
    assert d2h == pytest.approx(1, abs=0.01) and 0.24 < h2d < 1
    assert zenflow["copied_sizes"] == floor["copied_sizes"] == floor["counted_sizes"] == []
    text = (tmp_path / "step_time_smoke.md").read_text()
    assert "ZenFlowStrategy, S=4, d=1" in text and "benchmarks.step_time" in text
    assert (tmp_path / "step_time_smoke.png").stat().st_size > 1000


def test_a_failed_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--repeats", "1", "--methods", "floor", "--timeout", "0.2"]
    assert step_time.main([*arguments, "--results", str(tmp_path)]) == 1
    assert "FAILED: no result" in capsys.readouterr().out


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


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile([7.0], 0.99) == 7.0


def test_models_have_the_size_they_are_named_by() -> None:
    for params in (25e6, 150e6, 1.5e9, 7e9):
        with torch.device("meta"):
            model = TimedGpt(steps=1, params=params, batch=1, tokens=16)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.15)
    assert set(SHAPES) >= {25e6, 150e6, 1.5e9, 3e9, 7e9}
    with torch.device("meta"):
        simulated = SimulatedAccelerator(steps=1, params=151e6, compute_s=0.1)
    assert len(simulated.weights) == 36


class _Time:
    """Takes the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("asynchronous", "ends"), [(False, [103.0, 106.5, 115.5]), (True, [103.0, 105.0, 112.0])])
def test_host_work_delays_a_synchronous_accelerator_only(
    asynchronous: bool, ends: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's kernels take 1 s forward and 2 s, 2 s and 2 s backward; the host works for 1.5 s and for 7 s in between."""
    clock = _Time()
    monkeypatch.setattr("benchmarks.step_time.models.time", clock)
    with torch.device("meta"):
        device = SimulatedAccelerator(steps=1, params=5e6, compute_s=3.0, asynchronous=asynchronous).clock
    found = []
    device.forward(1.0)
    for host_s in (1.5, 7.0, 0.0):
        device.backward(2.0)
        found.append(clock.now)
        clock.now += host_s
    assert found == ends
    # The next step begins when the host gets there.
    device.forward(1.0)
    device.backward(1.0)
    assert clock.now == ends[-1] + 2.0


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


def test_a_method_is_refused_where_it_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "simulated"):
        with pytest.raises(SystemExit):
            step_time.parse_arguments(["--device", device, "--methods", "floor,torchao"])
        assert f"--methods torchao does not apply to --device {device}: its optimizer" in capsys.readouterr().err
        assert "torchao" not in step_time.parse_arguments(["--device", device]).methods
    assert "torchao" in step_time.parse_arguments(["--device", "cuda"]).methods


def test_torchaos_optimizer_as_far_as_a_cpu_shows_it() -> None:
    """The constructor needs CUDA; tested are its signature and that Lightning finds no state to move."""
    from torchao.optim import CPUOffloadOptimizer

    from benchmarks.peers.torchao import HostAdamW

    inspect.signature(CPUOffloadOptimizer).bind([], offload_gradients=True, lr=1e-4, weight_decay=0.01)
    assert not METHODS["torchao"].clips
    if not torch.cuda.is_available():
        module = TimedGpt(steps=1, params=25e6, batch=1, tokens=16)
        module.optimizer_class = METHODS["torchao"].optimizer
        with pytest.raises(AssertionError, match="only supports CUDA"):
            module.configure_optimizers()
    assert not HostAdamW.__new__(HostAdamW).state
