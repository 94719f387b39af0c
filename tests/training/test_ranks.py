"""Several ranks: those that Lightning or torchrun starts; partitions that cut parameters in mid-row; column proxies and norms, which are
added up over the ranks; more ranks than rows.

All cases of a number of ranks run in the same processes, one after the other, since starting them takes seconds.
"""

import functools
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from test_optimizer_in_backward import CORRECTS, PREDICTED, at_the_end
from test_optimizer_in_backward import NOTHING_LATE as VERIFIED
from test_provisional_update import CASES as PROVISIONAL
from test_provisional_update import PLAIN, UPDATED, check_updated_entries
from test_short_moments import CASES as SHORT_MOMENTS
from test_training import CASES as LATE
from test_training import compare_with_oracle
from torch import Tensor
from typing_extensions import override

from benchmarks.common.processes import fresh_environment
from harness import APPROXIMATE, EVERYTHING, Case, optimizer_of, run_here
from models import OptimizerOptions
from node_trainer import KEYS
from rank_processes import Runs, free_port, run_each, run_on_ranks
from same_bits import assert_close_to_adamw, assert_is_adamw, assert_same_run, assert_same_tensors

SCRIPT = Path(__file__).parents[1] / "support" / "node_trainer.py"

FIXED = Case(steps=11)
CLIPPED = replace(FIXED, accumulate=3, max_norm=1.0)
ADAM = replace(FIXED, precision="bf16-true", max_norm=1.0, optimizer=OptimizerOptions(kind="Adam"))
NOT_FINITE = {"not_finite": {(0, 1): math.nan, (4, 0): math.inf, (5, 1): -math.inf, (10, 1): math.nan}}
AUTOMATIC = replace(CLIPPED, model="SmallNet", topk_ratio=0.3)
BY_HAND = {
    "S=1, d=0": replace(AUTOMATIC, update_interval=1, publish_lag=0).with_keys(clip_prediction=False),
    "S=3, d=1": replace(AUTOMATIC, update_interval=3).with_keys(**EVERYTHING),
}
"""In automatic optimization, with which manual optimization is compared. Clip factors are the true ones: by hand, they are predicted from
one step later on.
"""


def by_hand(case: Case) -> Case:
    """A case in manual optimization, with steps in a closure."""
    return replace(case, model="ByHand", model_options={"max_norm": case.max_norm})


GRID = [
    (FIXED, 0.5, 7, 3),
    (CLIPPED, 0.05, 1, 0),
    (ADAM, 0.05, 4, 3),
]
OF_ADAMW = {
    **{
        f"{number}: top {k}, S={s}, d={d}": replace(case, topk_ratio=k, update_interval=s, publish_lag=d)
        for number, (case, k, s, d) in enumerate(GRID)
    },
    "everything": replace(CLIPPED, topk_ratio=0.3, publish_lag=2, flush_after=(6,), strategy_options=EVERYTHING),
    "not finite on one rank": replace(CLIPPED, topk_ratio=0.05, model_options=NOT_FINITE),
    # The second rank's partition holds nothing but padding.
    "tiny": replace(FIXED, model_options={"shapes": ((2, 1), (1,))}),
    **{
        name: PROVISIONAL[name]
        for name in (
            "a layer used now and then, bf16",
            "frozen layers, checkpointing",
            "freezing: layers in turn",
            "freezing: long lag",
            "freezing: changes of schedule",
            "freezing: nearly everything",
        )
    },
    **{f"in backward: {name}": PREDICTED[name] for name in ("TiedNet", "no gradient", "not finite")},
    **{
        f"{dtype} moments": replace(SHORT_MOMENTS["S=2, d=0, columns on the device"], max_norm=0.5).with_keys(
            moments_dtype=dtype
        )
        for dtype in ("bfloat16", "int8")
    },
    **{f"true factors: {name}": VERIFIED[name] for name in ("half", "accumulated", "not finite in the end")},
    **{f"in a closure: {name}": by_hand(case) for name, case in BY_HAND.items()},
    "in a closure: predicted clip factors": by_hand(
        replace(AUTOMATIC, update_interval=2, publish_lag=0).with_keys(**APPROXIMATE)
    ),
    "accumulated on the host": replace(CLIPPED, model="SmallNet", strategy_options=APPROXIMATE).with_keys(
        accumulate_on="host"
    ),
}
STEP_BY_STEP = {
    **{
        name: LATE[name]
        for name in ("long windows", "flushes", "accumulated, clipped", "in backward", "defaults, bf16-true")
    },
    # Ranks begin with the weights of the first one.
    "odd layouts": Case(model="OddNet", steps=6, topk_ratio=0.3, update_interval=4, publish_lag=1),
}


@functools.cache
def on_two_ranks() -> Runs:
    cases = {**OF_ADAMW, **STEP_BY_STEP, **BY_HAND, "updated": UPDATED, "plain": PLAIN}
    return run_each({name: replace(case, loop="trainer") for name, case in cases.items()})


@pytest.mark.parametrize("name", OF_ADAMW)
def test_the_state_is_adamws(name: str) -> None:
    """And all ranks show the same weights in all steps."""
    assert_is_adamw(OF_ADAMW[name], *on_two_ranks()[name])


@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_every_step_is_the_oracles(name: str) -> None:
    compare_with_oracle(STEP_BY_STEP[name], on_two_ranks()[name])


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_in_a_closure_have_the_bits_of_automatic_ones(name: str) -> None:
    for ours, expected in zip(on_two_ranks()[f"in a closure: {name}"], on_two_ranks()[name], strict=True):
        assert_same_run(ours, expected)


def test_provisional_updates_are_of_host_owned_matrices_only() -> None:
    for updated, plain in zip(on_two_ranks()["updated"], on_two_ranks()["plain"], strict=True):
        check_updated_entries(updated, plain, world_size=2)


THREE = Case(steps=9, topk_ratio=0.3, accumulate=2, publish_lag=2, max_norm=1.0, strategy_options=APPROXIMATE)
MORE = {
    "fixed gradients": THREE,
    "more ranks than rows": replace(THREE, model_options={"shapes": ((2, 3), (1, 5), (3, 1), (2,), (1,))}),
    "not finite on the last rank": replace(
        THREE, model="LinearLossModule", model_options={"factors": {3: math.nan, 5: math.inf}, "ranks": (2,)}
    ),
}


class LateWords(pl.Callback):
    """The second rank's words of the fourth step come late, or never, as behind a reduction that waits for a rank that saves alone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 1:
            words = optimizer_of(trainer).parts.rank.arena
            for of_kind in (words.step_words, words.block_words):
                of_kind.write = functools.partial(self._write, of_kind.write)  # type: ignore[method-assign]

    def _write(self, write: Callable[..., None], index: int, step: int, factor: Tensor) -> None:
        if step != 4:
            write(index, step, factor)
        elif self._seconds < math.inf:
            threading.Timer(self._seconds, write, (index, step, factor)).start()


def test_a_rank_that_waits_for_another_outlives_its_workers_limit() -> None:
    """Words are waited for as long as collectives; when they do not come, all ranks end with an error, and say which wait it was."""
    case = replace(FIXED, topk_ratio=0, update_interval=1, publish_lag=0, steps=6)
    late = replace(case, callbacks=(LateWords(2),)).with_keys(worker_timeout=1.0)
    never = replace(case, callbacks=(LateWords(math.inf),), fails=True)
    never = never.with_keys(worker_timeout=1.0, timeout=timedelta(seconds=5))
    runs = run_on_ranks({"in time": case, "late": late, "never": never})
    for ours, expected in zip(runs["late"], runs["in time"], strict=True):
        assert_same_run(ours, expected)
    other, waiting = (run.error for run in runs["never"])
    assert waiting is not None and other is not None
    assert re.search(r"WorkerError[\s\S]*step 4's clip coefficient did not arrive within 5000 ms", waiting)
    assert "left no result" not in other


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks(ranks: int) -> None:
    """To rounding: sums over more than two ranks have another order than the oracle's."""
    for name, (first, *others) in run_on_ranks(MORE, ranks=ranks).items():
        state = MORE[name].adamw(world_size=ranks)
        assert first.skipped == state.skipped == (2 if "finite" in name else 0)
        assert_close_to_adamw(first, state)
        for run in others:
            for ours, theirs in zip([*run.shown, run.weights], [*first.shown, first.weights], strict=True):
                assert all(torch.isfinite(w).all() for w in ours)
                assert_same_tensors(ours, theirs, name)


@pytest.mark.slow
def test_corrected_steps_have_the_bits_of_those_that_wait_for_the_norm() -> None:
    """On four ranks, each with gradients of its own."""
    network = replace(VERIFIED["a network"], max_norm=0.0275)
    cases = {
        name: replace(case, loop="trainer", callbacks=(CORRECTS,))
        for name, case in {"half": VERIFIED["half"], "a network": network}.items()
    }
    at_their_ends = {f"{name}, at the end": at_the_end(replace(case, callbacks=())) for name, case in cases.items()}
    runs = run_on_ranks({**cases, **at_their_ends}, ranks=4)
    for name in cases:
        for ours, expected in zip(runs[name], runs[f"{name}, at the end"], strict=True):
            assert_same_run(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Lightning", "torchrun"])
def test_a_script_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [sys.executable, *(torchrun if launcher == "torchrun" else []), str(SCRIPT), str(tmp_path), "6", ""]
    own = {"NODES": "1", "DEVICES": "2", "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=fresh_environment(**own), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    _, world_size, n_steps, weights = torch.load(tmp_path / "result.pt")
    assert (world_size, n_steps) == (2, 6)
    case = Case(model_options={"ranks_differ": False}, steps=6, strategy_options=KEYS, loop="direct")
    assert_same_tensors(weights, run_here(case).weights)
