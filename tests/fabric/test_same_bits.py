"""A plain loop under Fabric trains the Trainer's weights, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_files import assert_continues
from fabric_runs import set_up, train_step
from harness import EVERYTHING, Case, run_here, snapshot
from models import OptimizerOptions
from rank_processes import run_on_ranks
from same_bits import assert_same_run, assert_same_tensors

BASE = Case(model="SmallNet", steps=9, topk_ratio=0.3)
EXACT = replace(BASE, update_interval=1, publish_lag=0)
DEFAULTS = replace(BASE, update_interval=4, publish_lag=1).with_keys(**EVERYTHING)


@pytest.mark.parametrize(
    ("case", "max_norm"),
    [
        (EXACT, None),
        (DEFAULTS, 0.1),
        (replace(EXACT, precision="16-true"), 0.1),
        (replace(DEFAULTS, precision="16-mixed", stage=3), None),
    ],
    ids=["S=1,d=0", "S=4,d=1", "fp16", "fp16, mixed, stage 3"],
)
def test_the_loop_and_the_trainer(case: Case, max_norm: float | None) -> None:
    case = replace(case, max_norm=max_norm, accumulate=2 if max_norm else 1, flush_after=(5,))
    assert_same_run(run_here(replace(case, loop="fabric")), run_here(case))


@pytest.mark.parametrize("case", [EXACT, replace(DEFAULTS, stage=3)], ids=["S=1,d=0", "S=4,d=1, stage 3"])
def test_a_resumed_loop_continues_bit_for_bit(case: Case, tmp_path: Path) -> None:
    case = replace(case, loop="fabric", max_norm=0.1, accumulate=2, checkpoint=str(tmp_path / "checkpoint"))
    whole = run_here(replace(case, save_at=5))
    assert_continues(run_here(case), whole, 5)


@pytest.mark.slow
def test_two_ranks() -> None:
    cases = {
        f"{name}, {precision}, {max_norm}": replace(case, max_norm=max_norm, precision=precision, accumulate=2)
        for name, case in {"exact": EXACT, "defaults": DEFAULTS}.items()
        for max_norm, precision in [(None, "32-true"), (0.1, "32-true"), (0.1, "bf16-true"), (0.1, "bf16-mixed")]
    }
    loops = {f"fabric {name}": replace(case, loop="fabric") for name, case in cases.items()}
    runs = run_on_ranks({**cases, **loops})
    for name in cases:
        for ours, theirs in zip(runs[f"fabric {name}"], runs[name], strict=True):
            assert_same_run(ours, theirs)


def test_trainer_and_loop_continue_each_others_checkpoints(tmp_path: Path) -> None:
    """Weights, moments and the schedule, bit for bit; the learning rate of a loop is its own affair, and here constant."""
    case = replace(
        DEFAULTS, optimizer=OptimizerOptions(lr=1e-3, scheduler=False), checkpoint=str(tmp_path / "checkpoint")
    )
    whole = run_here(replace(case, save_at=5))
    fabric, model, optimizer, _ = set_up(case.make_model(), **case.keys())
    rest = fabric.load(case.checkpoint or "", {"model": model, "optimizer": optimizer})
    assert rest["global_step"] == 5
    for step in range(5, case.steps):
        train_step(fabric, model, optimizer, step)
    fabric.strategy.flush()
    assert_same_tensors(snapshot(model.module), whole.weights)
    fabric.strategy.teardown()


def test_a_loop_that_loads_an_earlier_step_repeats_the_steps_since(tmp_path: Path) -> None:
    """The worker waits for the repeated steps' own words: those of the steps before the load, of the same numbers, are gone."""
    max_norm = 0.1
    case = replace(EXACT, max_norm=max_norm)
    fabric, model, optimizer, scheduler = set_up(case.make_model(), **case.keys())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    arena = fabric.strategy.zenflow_optimizer.parts.rank.arena
    shown = []
    for begin in (0, 2):
        for step in range(begin, 5):
            train_step(fabric, model, optimizer, step, max_norm=max_norm)
            scheduler.step()
            if step >= 2:
                shown.append(snapshot(model.module))
            elif step == 1:
                fabric.save(tmp_path / "checkpoint", state)
        if begin == 0:
            assert [int(words.sequence.max()) for words in (arena.step_words, arena.block_words)] == [5, 5]
            fabric.load(tmp_path / "checkpoint", state)
            assert [int(words.sequence.max()) for words in (arena.step_words, arena.block_words)] == [0, 0]
    for first, again in zip(shown[:3], shown[3:], strict=True):
        assert_same_tensors(again, first)
    fabric.strategy.teardown()


def test_the_trainers_own_norm_counts_after_a_resume(tmp_path: Path) -> None:
    case = replace(EXACT, steps=4, checkpoint=str(tmp_path / "checkpoint"))
    run_here(replace(case, max_norm=0.1, save_at=2))
    with_other, without = (run_here(replace(case, max_norm=norm)) for norm in (1e-12, None))
    assert any(not torch.equal(a, b) for a, b in zip(with_other.exp_avg, without.exp_avg, strict=True))
