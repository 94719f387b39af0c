"""Several ranks: partitions that cut parameters in mid-row; column proxies and norms, which are added up over the ranks; more ranks than
rows. Under ZeRO stage 3 pieces of every parameter, several sub-groups, small parameters that stay gathered; with the parameters in host
memory the bits of parameters on the device.

All cases of a number of ranks run in the same processes, one after the other, since starting them takes seconds.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_data_types import CASES as SHORT_MOMENTS
from test_equivalence import ACCUMULATED, BF16, FLUSHES, case_of
from test_equivalence import CASES as SEQUENCES
from test_equivalence import STEP_BY_STEP as LATE
from test_foreign_state import State, assert_found
from test_optimizer_in_backward import CORRECTS, PREDICTED
from test_optimizer_in_backward import NOTHING_LATE as VERIFIED
from test_provisional_update import CASES as PROVISIONAL
from test_provisional_update import PLAIN, UPDATED, check_updated_entries
from torch import Tensor

from between_steps import clip
from callbacks import At
from checkpoint_files import assert_continues
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, optimizer_of
from models import OptimizerOptions
from processes import wait_for
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import assert_as_promised, assert_close_to_adamw, assert_same_run, assert_same_state, assert_same_tensors
from worker_killer import KillsWorker

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


FREEZES = {"frozen_in": {0: (2, 4), 3: (3, 100)}}
FIXED_3 = replace(FIXED, stage=3)
LATE_3 = replace(FIXED_3, topk_ratio=0.05).with_keys(reduce_bucket_size=400)
OF_STAGE_3 = {
    "in host memory, clipped": case_of(BF16, 0, 1, 0, offload_parameters=True),
    "S=4, d=1, top-k": LATE_3,
    **{name: SEQUENCES[name] for name in ("everything", "changes of schedule")},
    "freezing": case_of("fp32", 0.3, 4, 1, model_options=FREEZES).with_keys(**EVERYTHING),
    "int8 moments, tiny": case_of("fp32", 0, 1, 0, model_options={"shapes": ((2, 1), (1,))}).with_keys(
        moments_dtype="int8"
    ),
}
FP16 = Case(precision="16-true", topk_ratio=0, update_interval=1, publish_lag=0, stage=3)
"""Its first steps overflow. The gradients of this model do not depend on the weights."""
# With another learning rate rounding grows: to 2e-6 within 20 steps at 1e-3.
SLOW = OptimizerOptions(lr=3e-4)
NETWORK = Case(model="TiedNet", optimizer=SLOW, steps=8, topk_ratio=0, update_interval=1, publish_lag=0, stage=3)
CLIPPED_3 = replace(NETWORK, max_norm=0.3)
NOT_CLIPPED = {
    "fp32": case_of("fp32", 0, 1, 0, **FLUSHES),
    "accumulated on the host": case_of(ACCUMULATED, 0, 1, 0, max_norm=None, steps=5).with_keys(accumulate_on="host"),
    "freezing": case_of("fp32", 0, 1, 0, model_options=FREEZES),
}
ON_DEVICE = {
    **{name: replace(case, stage=3) for name, case in NOT_CLIPPED.items()},
    "clipped, synchronous": CLIPPED_3.with_keys(overlap_step=False),
    "fp16, synchronous": FP16.with_keys(overlap_step=False),
}
"""Whose bits do not depend on how the partition is cut into blocks, as predicted factors do, and bf16 moments of unused parameters."""


def on_host(case: Case) -> Case:
    return replace(case, offload_parameters=True)


OF_ADAMW = {
    "S=7": replace(FIXED, topk_ratio=0.5, update_interval=7),
    "S=1, d=0, clipped": replace(CLIPPED, update_interval=1, publish_lag=0),
    "S=1, d=1, Adam": replace(ADAM, update_interval=1),
    "everything": replace(CLIPPED, topk_ratio=0.3, flush_after=(6,), strategy_options=EVERYTHING),
    # By what each rank measures.
    "changes of schedule": Case(steps=24, max_norm=1.0, topk_ratio=0.3, strategy_options={**EVERYTHING, **AUTO}),
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
    "true factors, stage 3": replace(VERIFIED["half"], stage=3, callbacks=(CORRECTS,)),
    "true factors: a network": replace(VERIFIED["a network"], max_norm=0.0275, callbacks=(CORRECTS,)),
    **{f"in a closure: {name}": by_hand(case) for name, case in BY_HAND.items()},
    "in a closure: predicted clip factors": by_hand(
        replace(AUTOMATIC, update_interval=2, publish_lag=0).with_keys(**APPROXIMATE)
    ),
    "accumulated on the host": replace(CLIPPED, model="SmallNet", strategy_options=APPROXIMATE).with_keys(
        accumulate_on="host"
    ),
    **{f"stage 3: {name}": replace(case, stage=3) for name, case in OF_STAGE_3.items()},
    "device: clipped, synchronous": ON_DEVICE["clipped, synchronous"],
    "device: convolution, embedding": replace(NETWORK, model="SmallNet"),
    **{f"host: {name}": on_host(ON_DEVICE[name]) for name in NOT_CLIPPED},
    **{
        name: LATE[name]
        for name in ("long windows", "flushes", "accumulated, clipped", "in backward", "defaults, bf16-true")
    },
    **{f"stage 3: {name}": replace(LATE[name], stage=3) for name in ("flushes", "in backward")},
    # Ranks begin with the weights of the first one.
    "odd layouts": Case(model="OddNet", steps=6, topk_ratio=0.3, update_interval=4, publish_lag=1),
    "half resident": replace(CLIPPED, update_interval=1, publish_lag=0).with_keys(offload_ratio=0.5),
    "half resident, stage 3, everything": replace(OF_STAGE_3["everything"], stage=3).with_keys(offload_ratio=0.5),
}

SAME_RUNS = {
    **{f"{how}: {name}": name for how in ("in a closure", "fabric") for name in BY_HAND},
    **{f"fabric: {name}": name for name in ("S=1, d=1, Adam", "stage 3: S=4, d=1, top-k")},
    **{f"host: {name}": f"device: {name}" for name in ON_DEVICE},
    # Every forward pass sees the true clip factor, although blocks are submitted in backward, and workers die.
    **dict.fromkeys(("host: clipped", "host: killed"), "device: clipped, synchronous"),
    # Nothing but the model reads the weights: the worker's answers are awaited where its layers are fetched.
    "not watched": "device: accumulated on the host",
}
RESUMED = {"device to host": (NETWORK, True), "host to device": (on_host(NETWORK), False)}
"""What is saved, and whether it goes on in host memory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what the cases write."""
    return tmp_path_factory.mktemp("ranks")


def cases(folder: Path) -> dict[str, Case]:
    found = {
        **OF_ADAMW,
        **BY_HAND,
        "updated": UPDATED,
        "plain": PLAIN,
        "stage 3: fp16": FP16,
        "stage 2: fp16": replace(FP16, stage=2),
        "states": replace(LATE_3, callbacks=(State(folder, read_after=3),)),
        "states in the middle": replace(LATE_3, steps=3),
        "host: killed": replace(on_host(CLIPPED_3), callbacks=(KillsWorker(seed=3),)).with_keys(
            max_worker_restarts=1000
        ),
        "host: clipped": on_host(CLIPPED_3),
        "host: clipped by torch": replace(
            on_host(CLIPPED_3),
            max_norm=None,
            callbacks=(At("on_before_optimizer_step", functools.partial(clip, CLIPPED_3.max_norm)),),
        ),
        "not watched": replace(on_host(ON_DEVICE["accumulated on the host"]), watched=False),
        **{f"host: {name}": on_host(case) for name, case in ON_DEVICE.items()},
        **{f"device: {name}": case for name, case in ON_DEVICE.items()},
    }
    for name, (case, to) in RESUMED.items():
        saved = replace(case, save_at=5, checkpoint=str(folder / name))
        found |= {f"saved: {name}": saved, f"resumed: {name}": replace(saved, save_at=0, offload_parameters=to)}
    found = {name: replace(case, loop="trainer") for name, case in found.items()}
    of_fabric = {name: theirs for name, theirs in SAME_RUNS.items() if name.startswith("fabric")}
    return found | {name: replace(found[theirs], loop="fabric") for name, theirs in of_fabric.items()}


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """On two ranks."""
    return run_each(cases(folder))


@pytest.mark.parametrize("name", OF_ADAMW)
def test_state_and_shown_weights(name: str, runs: Runs) -> None:
    """And all ranks show the same weights in all steps."""
    assert_as_promised(OF_ADAMW[name], *runs[name])


@pytest.mark.parametrize("name", SAME_RUNS)
def test_the_same_bits(name: str, runs: Runs) -> None:
    for ours, expected in zip(runs[name], runs[SAME_RUNS[name]], strict=True):
        assert_same_run(ours, replace(expected, shown=[]) if name == "not watched" else expected)


def test_fp16_with_a_dynamic_loss_scale_has_the_state_of_stage_2(runs: Runs) -> None:
    for ours, theirs in zip(runs["stage 3: fp16"], runs["stage 2: fp16"], strict=True):
        assert_same_state(ours, theirs)
        assert ours.skipped > 0


def test_states_and_gradients_of_whole_parameters(runs: Runs, folder: Path) -> None:
    assert_found(LATE_3, runs["states"], runs["states in the middle"][0], folder)


def test_clipped_by_torch(runs: Runs) -> None:
    """On all ranks, each of which has a part of the gradients."""
    for ours, by_torch in zip(runs["host: clipped"], runs["host: clipped by torch"], strict=True):
        torch.testing.assert_close(ours.weights, by_torch.weights, rtol=0, atol=2e-6)
        torch.testing.assert_close(ours.losses, by_torch.losses, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(name: str, runs: Runs) -> None:
    for saved, resumed in zip(runs[f"saved: {name}"], runs[f"resumed: {name}"], strict=True):
        assert_continues(resumed, saved, 5)


def test_provisional_updates_are_of_host_owned_matrices_only(runs: Runs) -> None:
    for updated, plain in zip(runs["updated"], runs["plain"], strict=True):
        check_updated_entries(updated, plain, world_size=2)


THREE = Case(steps=9, topk_ratio=0.3, accumulate=2, max_norm=1.0, strategy_options=APPROXIMATE)
MORE = {
    "fixed gradients": THREE,
    "more ranks than rows": replace(THREE, model_options={"shapes": ((2, 3), (1, 5), (3, 1), (2,), (1,))}),
    "not finite on the last rank": replace(THREE, model_options={"not_finite": {(3, 2): math.nan, (5, 2): math.inf}}),
    "stage 3": LATE_3,
    "stage 3, tiny": replace(FIXED_3, topk_ratio=0, model_options={"shapes": ((2, 1), (1,))}),
}


def delay_words(seconds: float, trainer: pl.Trainer) -> None:
    """The second rank's words of the fourth step come late, or never, as behind a reduction that waits for a rank that saves alone."""

    def late(write: Callable[..., None], to: Tensor, word: Tensor, *, behind: Iterable[Any]) -> None:
        if word.view(torch.int64)[1] != 4:
            write(to, word, behind=behind)
        elif seconds < math.inf:
            threading.Timer(seconds, to.copy_, (word.clone(),)).start()

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


def stay_away(given_up: Path, trainer: pl.Trainer) -> None:
    """Rank 1 says nothing any more from its third step on, as a node that is cut off, until the other one has given up."""
    if (trainer.global_step, trainer.global_rank) == (2, 1):
        wait_for(given_up.exists, 200)


def give_up(given_up: Path, _: pl.Trainer) -> None:
    given_up.touch()


def test_a_node_that_is_cut_off_is_given_up(tmp_path: Path) -> None:
    """When the strategy's `timeout` is over, and not torch's of 30 minutes."""
    away, gives_up = (functools.partial(act, tmp_path / "given up") for act in (stay_away, give_up))
    callbacks = (At("on_train_batch_start", away), At("on_exception", gives_up))
    case = replace(FIXED, fails=True, callbacks=callbacks).with_keys(timeout=timedelta(seconds=5))
    for run in run_on_ranks({"cut off": case})["cut off"]:
        assert run.error is not None and "gloo" in run.error


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks(ranks: int) -> None:
    """To rounding: sums over more than two ranks have another order than the oracle's. Several pieces may be padding."""
    for name, (first, *others) in run_on_ranks(MORE, ranks=ranks).items():
        state = MORE[name].adamw(world_size=ranks)
        assert first.skipped == state.skipped == (2 if "finite" in name else 0)
        assert_close_to_adamw(first, state)
        for run in others:
            for ours, theirs in zip([*run.shown, run.weights], [*first.shown, first.weights], strict=True):
                assert all(torch.isfinite(w).all() for w in ours)
                assert_same_tensors(ours, theirs, name)
