"""Blocks whose gradients come too late in backward: the device owns them entirely."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from typing_extensions import override

from harness import AUTO, EVERYTHING, Case, run_here
from lightning_zenflow.step import auto_control
from models import SHAPES
from rank_processes import run_on_ranks
from same_bits import assert_is_adamw, assert_same_state, assert_same_tensors
from scripted_schedule import Entry
from worker_killer import KillsWorker, optimizer_of

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

LAST, BEGIN = (0, 1, 2), 3
TAIL = (BEGIN, 1, 0, LAST)
CASE = Case(steps=14, topk_ratio=0.3, schedules=(TAIL,), strategy_options=AUTO)
CLIPPED = replace(CASE, max_norm=1.0)


def killed(shapes: Sequence[Sequence[int]], *schedules: Entry) -> Case:
    """With a kill of the worker in every step, and flushes."""
    case = replace(CLIPPED, model_options={"shapes": shapes}, schedules=schedules, flush_after=(5, 6, 10))
    return replace(case.with_keys(max_worker_restarts=1000), callbacks=(KillsWorker(seed=1),))


HISTORY = ((BEGIN, 1, 0, LAST[:2]), (6, 2, 0), (9, 2, 1), (12, 1, 0, (*LAST, 7)), (17, 4, 0), (21, 1, 0))
CASES = {
    "nothing else on the device": replace(CLIPPED, topk_ratio=0),
    "accumulated on the host": replace(CLIPPED, accumulate=2).with_keys(accumulate_on="host"),
    "bf16": replace(CLIPPED, precision="bf16-true"),
    "warm-up": replace(CLIPPED, warm_up=5),
    "frozen and unfrozen": replace(
        CLIPPED, model="LinearLossModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}
    ),
    "changes, everything": replace(CLIPPED, steps=28, schedules=HISTORY).with_keys(
        **{**EVERYTHING, "select_interval": 5}
    ),
    "every block": replace(CLIPPED, schedules=((BEGIN, 1, 0, tuple(range(15))),)),
    "killed, it grows, S changes": killed(
        SHAPES[:6], (BEGIN, 1, 0, LAST[:2]), (5, 1, 0, LAST), (8, 2, 0), (11, 1, 0, (*LAST, 7))
    ),
    "killed, S=2, one row, one column": killed(((1, 300), (211, 1), (17,)), (BEGIN, 2, 0, LAST)),
    "killed, fewer elements than blocks": killed(((2, 3), (1,)), TAIL),
}


@pytest.mark.parametrize("name", CASES)
def test_the_exact_state_is_adamws(name: str) -> None:
    case = CASES[name]
    assert_is_adamw(case, run_here(case))
    assert all(callback.kills >= case.steps for callback in case.callbacks if isinstance(callback, KillsWorker))


class TailShares(pl.Callback):
    """The number of blocks in the tail after each step, as the counters say."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer = optimizer_of(trainer)
        share = optimizer.counters.read().tail_share
        self.seen.append(round(share * optimizer.parts.jobs.staggered.n_blocks))


def test_no_shown_weight_is_late() -> None:
    """Also with compensation, which late weights would get."""
    case = replace(CASE, topk_ratio=0).with_keys(weight_prediction="auto", provisional_scale="auto")
    shares = TailShares()
    run, exact = run_here(case, callbacks=[shares]), run_here(case.exact())
    for ours, theirs in zip(run.shown, exact.shown, strict=True):
        assert_same_tensors(ours, theirs, "the shown weight")
    assert shares.seen == [0] * (BEGIN - 1) + [len(LAST)] * (case.steps - BEGIN + 1)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    case = replace(CLIPPED, model="SmallNet").with_keys(**EVERYTHING)
    saved = replace(case, save_at=8, checkpoint=str(tmp_path / "8.ckpt"))
    whole = run_here(saved)
    rest = run_here(replace(saved, save_at=0, schedules=((100, 1, 0),)))
    assert len(rest.shown) == case.steps - 8
    assert_same_state(rest, whole)
    assert rest.losses == whole.losses[8:]


def test_what_a_step_waits_for_becomes_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the last 3 of 15 blocks took 6 % of each step; the tail is saved."""
    monkeypatch.setattr(auto_control, "_LOOK", 1)
    monkeypatch.setattr(auto_control, "load_and_stall", lambda _: (0.3, 0.06))
    case = replace(CLIPPED, schedules=(), save_at=10, checkpoint=str(tmp_path / "10.ckpt"))
    shares, resumed = TailShares(), TailShares()
    assert_is_adamw(case, run_here(case, callbacks=[shares]))
    run_here(replace(case, save_at=0), callbacks=[resumed])
    assert shares.seen == [0] * 7 + [3] * 7
    assert resumed.seen == [3] * 4


@pytest.mark.parametrize(("topk_ratio", "tail"), [(0.0, "auto"), (0.3, "auto"), (0.3, "device")])
def test_a_tail_without_memory_is_dropped(
    topk_ratio: float, tail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is resumed where the device has less room: its blocks are the worker's again, and no bit of the exact state is lost."""
    case = replace(CLIPPED, topk_ratio=topk_ratio, schedules=((BEGIN, 2, 0, LAST),)).with_keys(tail=tail)
    saved = replace(case, save_at=8, checkpoint=str(tmp_path / "8.ckpt"))
    whole, shares, asked = run_here(saved), TailShares(), set[float]()
    monkeypatch.setattr(auto_control, "has_room", lambda n_bytes, _: asked.add(n_bytes))
    rest = run_here(replace(saved, save_at=0, schedules=()), callbacks=[shares])
    assert_same_state(rest, whole)
    assert shares.seen == [len(LAST) if tail == "device" else 0] * 6
    assert ("has no room for 3 blocks that it owned" in caplog.text) == (tail == "auto") == bool(asked)
    # fp32 weights and both moments, and a gradient.
    assert all(n_bytes % (4 * 4) == 0 for n_bytes in asked)


def test_two_ranks() -> None:
    """Each rank has a tail of its own; on the second one other parameters arrive last."""
    cases = {"both": CLIPPED, "one": replace(CLIPPED, schedules=((*TAIL, 1),))}
    runs = run_on_ranks({**cases, "exact": CLIPPED.exact()})
    for run in (run for name in cases for run in runs[name]):
        assert_same_state(run, runs["exact"][0])
        assert_same_tensors(run.weights, runs["exact"][0].weights, "the weight at the end")
