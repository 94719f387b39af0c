"""The benchmark of the monitor's cost: a smoke run, and its arithmetic."""

import re

import pytest

from benchmarks.monitor_overhead import AlternatingMonitor, main, median_with_bounds


def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--device simulated --params 4.2e6 --compute-ms 1 --log-every 2 --run 2 --pairs 3 --warm-up 2"
    assert main(arguments.split()) == 0
    pattern = r"step with the monitor / without: \d+\.\d{4} \(.* to .*\), 3 pairs of 2 steps; \d+\.\d ms a step without"
    assert re.search(pattern, capsys.readouterr().out)


def test_runs_alternate_in_turning_order() -> None:
    monitor = AlternatingMonitor(warm_up=3, run=2)
    monitored = [monitor._monitors(step) for step in range(1, 20)]
    assert monitored == [True] * 5 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 2


def test_bounds_are_order_statistics() -> None:
    assert median_with_bounds([float(i) for i in range(1, 101)]) == (50.5, 41, 60)
    assert median_with_bounds([3.0, 1.0, 2.0]) == (2, 1, 3)
