"""The soak script, for seconds: it runs, and finds what it looks for."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import fresh_environment


def test_soak(tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    options = ["--minutes", "0", "--leg-steps", "10", "--kill-every", "3", "--width", "32"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *options, "--output", str(result)],
        cwd=Path(__file__).parents[2],
        env=fresh_environment(),
        capture_output=True,
        timeout=250,
        check=True,
    )
    found = json.loads(result.read_text())
    assert found["same_bits"]
    assert found["legs"] == 3
    assert found["restarts"] > 0
    assert found["workers_left"] == 0
