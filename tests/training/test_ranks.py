"""Several ranks: partitions that cut parameters in mid-row; column proxies and norms, which are
added up over the ranks; more ranks than rows.

All cases of a number of ranks run in the same processes, one after the other, since starting them takes seconds.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_equivalence import STEP_BY_STEP as LATE
from test_optimizer_in_backward import CORRECTS, PREDICTED
from test_optimizer_in_backward import NOTHING_LATE as VERIFIED
from test_provisional_update import CASES as PROVISIONAL
from test_provisional_update import PLAIN, UPDATED, check_updated_entries
from test_short_moments import CASES as SHORT_MOMENTS
from torch import Tensor

from callbacks import At
from harness import APPROXIMATE, EVERYTHING, Case, optimizer_of
from lightning_zenflow.worker.arena import StepWords
from models import OptimizerOptions
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import assert_close_to_adamw, assert_is_adamw, assert_same_run, assert_same_tensors, compare_with_oracle

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


OF_ADAMW = {
    "S=7": replace(FIXED, topk_ratio=0.5, update_interval=7),
    "S=1, d=0, clipped": replace(CLIPPED, update_interval=1, publish_lag=0),
    "S=1, d=1, Adam": replace(ADAM, update_interval=1),
    "everything": replace(CLIPPED, topk_ratio=0.3, flush_after=(6,), strategy_options=EVERYTHING),
    "not finite on one rank": replace(CLIPPED, model_options=NOT_FINITE),
    # The second rank's partition holds nothing but padding.
    "tiny": replace(FIXED, model_options={"shapes": ((2, 1), (1,))}),
    **{
        name: PROVISIONAL[name]
        for name in (
            "a layer used now and then, bf16",
            "frozen layers, checkpointing",
            "freezing: layers in turn",
            "freezing: S=1, d=1",
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
    **{
        f"true factors: {name}": replace(VERIFIED[name], callbacks=(CORRECTS,))
        for name in ("half", "accumulated", "not finite in the end")
    },
    "true factors: a network": replace(VERIFIED["a network"], max_norm=0.0275, callbacks=(CORRECTS,)),
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
    under_fabric = {f"fabric: {name}": replace(cases[name], loop="fabric") for name in (*BY_HAND, "S=1, d=1, Adam")}
    return run_each({name: replace(case, loop="trainer") for name, case in cases.items()} | under_fabric)


@pytest.mark.parametrize("name", OF_ADAMW)
def test_the_state_is_adamws(name: str) -> None:
    """And all ranks show the same weights in all steps, where clip factors are verified AdamW's."""
    assert_is_adamw(OF_ADAMW[name], *on_two_ranks()[name], shown="true factors" in name)


@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_every_step_is_the_oracles(name: str) -> None:
    compare_with_oracle(STEP_BY_STEP[name], on_two_ranks()[name])


@pytest.mark.parametrize(("how", "name"), [*product(("in a closure", "fabric"), BY_HAND), ("fabric", "S=1, d=1, Adam")])
def test_steps_in_a_closure_or_a_loop_have_the_bits_of_automatic_ones(how: str, name: str) -> None:
    for ours, expected in zip(on_two_ranks()[f"{how}: {name}"], on_two_ranks()[name], strict=True):
        assert_same_run(ours, expected)


def test_provisional_updates_are_of_host_owned_matrices_only() -> None:
    for updated, plain in zip(on_two_ranks()["updated"], on_two_ranks()["plain"], strict=True):
        check_updated_entries(updated, plain, world_size=2)


THREE = Case(steps=9, topk_ratio=0.3, accumulate=2, max_norm=1.0, strategy_options=APPROXIMATE)
MORE = {
    "fixed gradients": THREE,
    "more ranks than rows": replace(THREE, model_options={"shapes": ((2, 3), (1, 5), (3, 1), (2,), (1,))}),
    "not finite on the last rank": replace(
        THREE, model="LinearLossModule", model_options={"factors": {3: math.nan, 5: math.inf}, "ranks": (2,)}
    ),
}


def delay_words(seconds: float, trainer: pl.Trainer) -> None:
    """The second rank's words of the fourth step come late, or never, as behind a reduction that waits for a rank that saves alone."""

    def late(write: Callable[..., None], words: StepWords, index: int, word: Tensor, *, behind: Iterable[Any]) -> None:
        if word.view(torch.int64)[1] != 4:
            write(words, index, word, behind=behind)
        elif seconds < math.inf:
            threading.Timer(seconds, words[index].copy_, (word.clone(),)).start()

    if trainer.global_rank == 1:
        jobs = optimizer_of(trainer).training.parts.jobs
        jobs._write_word = functools.partial(late, jobs._write_word)  # type: ignore[method-assign]


def test_a_rank_that_waits_for_another_outlives_its_workers_limit() -> None:
    """Words are waited for as long as collectives; when they do not come, all ranks end with an error, and say which wait it was."""
    case = replace(FIXED, topk_ratio=0, update_interval=1, publish_lag=0, steps=6)
    delay = lambda seconds: (At("on_train_start", functools.partial(delay_words, seconds)),)  # noqa: E731
    # Longer than a busy machine may keep the worker from looking at a word.
    late = replace(case, callbacks=delay(5)).with_keys(worker_timeout=3.0)
    never = replace(case, callbacks=delay(math.inf), fails=True)
    never = never.with_keys(worker_timeout=3.0, timeout=timedelta(seconds=5))
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
