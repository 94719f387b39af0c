"""A process that is killed while it saves leaves a complete checkpoint, from which training goes on as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common.processes import fresh_environment

SCRIPT = Path(__file__).parents[1] / "support" / "killed_saves.py"


def run(folder: Path, how: str, argument: str, timeout_s: float, *, exchange: bool = True) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), how, argument, "exchange" if exchange else "no exchange"],
        env=fresh_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ours, theirs = (torch.load(folder / f"{name}.pt") for name in ("disturbed", "undisturbed"))
    for name, weights in theirs.items():
        assert torch.equal(ours[name], weights), name


def test_killed_at_chosen_points(tmp_path: Path) -> None:
    run(tmp_path, "injected", json.dumps([0.0, 0.3, 0.6, 0.9]), timeout_s=280)


def test_killed_at_renames_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    run(tmp_path, "injected", json.dumps([]), timeout_s=280, exchange=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_many_points(exchange: bool, tmp_path: Path) -> None:
    run(tmp_path, "injected", json.dumps([i / 40 for i in range(41)]), timeout_s=1700, exchange=exchange)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_instants(tmp_path: Path) -> None:
    run(tmp_path, "random", "25", timeout_s=1700)
