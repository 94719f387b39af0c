"""The reliability benchmark for seconds."""

import json
from pathlib import Path

from benchmarks.common.processes import run_process
from benchmarks.reliability.__main__ import main


def test_soak(tmp_path: Path) -> None:
    options = ["--minutes", "0", "--leg-steps", "10", "--kill-every", "3", "--width", "32", "--results", str(tmp_path)]
    assert run_process(main, options, timeout=250) == 0
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["same_bits"]
    assert found["legs"] == 3
    assert found["restarts"] > 0
    assert found["workers_left"] == 0
