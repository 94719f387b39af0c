"""More ranks: two started by Lightning or torchrun, three and four with partitions that cut parameters, more ranks than rows."""

import functools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.processes import fresh_environment
from harness import APPROXIMATE, Case, Run
from rank_processes import free_port, run_on_ranks
from reference import adamw_reference
from same_bits import assert_close_to_adamw, assert_same_tensors
from side_by_side import Net

SCRIPT = Path(__file__).parents[1] / "support" / "trainer_script.py"


def plain_torch() -> tuple[int, list[torch.Tensor]]:
    """What `trainer_script` does, as a loop over both ranks' data; five batches an epoch, three a step."""
    model = Net(length=5)
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    steps = 0
    for epoch in range(2):
        for micro in range(5):
            for rank in range(2):
                (model.loss(micro + 100 * epoch, 0, rank) / (2 * 3)).backward()
            if micro in (2, 4):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                steps += 1
    return steps, [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Lightning", "torchrun"])
def test_a_script_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    output = tmp_path / "weights.pt"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [sys.executable, *(torchrun if launcher == "torchrun" else []), str(SCRIPT), str(output)]
    environment = fresh_environment(MASTER_PORT=str(free_port()), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ours, theirs = torch.load(output), plain_torch()
    assert ours[0] == theirs[0]
    for a, b in zip(ours[1], theirs[1], strict=True):
        # float32 rounding, see test_training.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


FIXED = Case(steps=9, topk_ratio=0.3, accumulate=2, publish_lag=2, max_norm=1.0, strategy_options=APPROXIMATE)
CASES: dict[str, Case] = {
    "fixed gradients": FIXED,
    "more ranks than rows": replace(FIXED, model_options={"shapes": ((2, 3), (1, 5), (3, 1), (2,), (1,))}),
    "not finite on the last rank": replace(
        FIXED, model="HostileModule", model_options={"factors": {3: math.nan, 5: 3e18}, "ranks": (2,)}
    ),
}
RANKS = pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])


@functools.cache
def all_runs(ranks: int) -> dict[str, list[Run]]:
    return run_on_ranks(CASES, ranks=ranks)


@pytest.mark.parametrize("name", CASES)
@RANKS
def test_state_is_adamws(name: str, ranks: int) -> None:
    case, runs = CASES[name], all_runs(ranks)[name]
    weights, gradients, groups = case.fixed_gradients(world_size=ranks)
    for of_step in gradients:
        square = sum(float(g.double().square().sum()) for g in of_step)
        if not square <= torch.finfo(torch.float32).max:
            of_step[0] = torch.full_like(of_step[0], math.nan)
    state = adamw_reference(weights, gradients, groups, max_norm=1.0)
    assert state.skipped == (2 if name == "not finite on the last rank" else 0)
    assert_close_to_adamw(runs[0], state)
    for run in runs:
        assert run.skipped == state.skipped
        for of_ours, of_first in zip([*run.shown, run.weights], [*runs[0].shown, runs[0].weights], strict=True):
            assert all(torch.isfinite(w).all() for w in of_ours)
            assert_same_tensors(of_ours, of_first)
