"""A process that is killed while it saves leaves a complete checkpoint, from which training goes on as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common.processes import fresh_environment

# `StagedSave` alone is killed at each call in `test_atomic.py`.
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "killed_saves.py"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("format_", ["deepspeed", "lightning"])
def test_killed_at_points_of_a_save(format_: str, in_background: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(tmp_path)),
            *(json.dumps([i / 40 for i in range(41)]), format_, *(["in background"] if in_background else [])),
        ],
        env=fresh_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("disturbed", "undisturbed"))
    for name, weights in theirs.items():
        assert torch.equal(ours[name], weights), name
