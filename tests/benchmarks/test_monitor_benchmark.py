"""The benchmark of the monitor's cost: a smoke run, and its arithmetic."""

import json
from pathlib import Path

import pytest

from benchmarks.monitor.__main__ import main, median_with_bounds, row
from benchmarks.monitor.alternating import AlternatingMonitor, Costs, Setting


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--settings", "4.2e6x1x4", "--seconds", "0.1", "--results", str(tmp_path)]) == 0
    (measured,) = json.loads((tmp_path / "monitor_overhead.json").read_text())["measured"]
    assert measured["setting"] == {"params": 4.2e6, "compute_ms": 1.0, "log_every": 4}
    n_pairs = len(measured["hooks_s"])
    assert n_pairs >= 1
    for times in (measured["process_s"], measured["wall_s"]):
        assert len(times["on"]) == len(times["off"]) == n_pairs
        assert min(times["on"] + times["off"]) > 0
    assert all(0 < hooks_s < on_s for hooks_s, on_s in zip(measured["hooks_s"], measured["wall_s"]["on"], strict=True))
    # A copy down and a copy up at least, in the step before the logged one.
    assert measured["n_spans"] > 4
    assert measured["figure_s"] > 0 and measured["span_s"] > 0
    text = (tmp_path / "monitor_overhead.md").read_text()
    assert text.strip() in capsys.readouterr().out and "| 4.2 M" in text


def test_runs_alternate_in_turning_order() -> None:
    setting = Setting(params=1e6, compute_ms=1, log_every=4)
    assert (setting.run, setting.warm_up) == (4, 20)
    monitor = AlternatingMonitor(Costs(setting=setting), seconds=1)
    monitored = [monitor.monitors(step) for step in range(17, 41)]
    assert monitored == [True] * 8 + [False] * 8 + [True] * 8


def test_a_row_by_hand() -> None:
    costs = Costs(
        setting=Setting(params=2e6, compute_ms=1, log_every=10),
        hooks_s=[1e-3, 2e-3, 3e-3],
        process_s={"on": [0.013, 0.012, 0.014], "off": [0.010, 0.010, 0.010]},
        wall_s={"on": [0.1, 0.2, 0.3], "off": [0.1, 0.1, 0.1]},
        n_spans=100,
        span_s=1e-5,
        figure_s=0.4,
    )
    # 100 spans of 10 us in one step of ten, a figure of 0.4 s in one of a thousand.
    assert costs.own_s() == pytest.approx([1.5e-3, 2.5e-3, 3.5e-3])
    shown = row(costs)
    assert shown["training thread, us a step"] == "2500 (1500 to 3500)"
    assert shown["% of the step"] == "2.50 (1.50 to 3.50)"
    assert shown["0.5 % of a step of"] == "700 ms"
    assert shown["process, on - off, us"] == "3000 (2000 to 4000)"
    assert (shown["step ms"], shown["pairs"]) == ("100.0", "3")


def test_bounds_are_order_statistics() -> None:
    assert median_with_bounds([float(i) for i in range(1, 101)]) == (50.5, 41, 60)
    assert median_with_bounds([3.0, 1.0, 2.0]) == (2, 1, 3)
