"""Blocks whose gradients come too late in backward: the device owns them entirely."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor
from torch import distributed as dist
from typing_extensions import override

from harness import AUTO, EVERYTHING, Case, run_here
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.schedule.auto_policy import SchedulePolicy, candidates_of
from lightning_zenflow.step import auto_control
from lightning_zenflow.step.arrivals import Arrivals
from models import SHAPES, TestModule
from rank_processes import run_on_ranks
from rank_states import make_rank_state
from replay_reference import ReplayedAdamW
from same_bits import assert_same_state, assert_same_tensors
from small_arena import COUNTS, make_partition
from worker_killer import KillsWorker, optimizer_of

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

LAST, BEGIN = (0, 1, 2), 3
TAIL = (BEGIN, 1, 0, LAST)
CASE = Case(steps=14, topk_ratio=0.3, schedules=(TAIL,), strategy_options=AUTO)
CLIPPED = replace(CASE, max_norm=1.0)
HISTORY = ((BEGIN, 1, 0, LAST[:2]), (6, 2, 0), (9, 2, 1), (12, 1, 0, (*LAST, 7)), (17, 4, 0), (21, 1, 0))
CASES = {
    "nothing else on the device": replace(CLIPPED, topk_ratio=0),
    "accumulated on the host": replace(CLIPPED, accumulate=2).with_keys(accumulate_on="host"),
    "bf16": replace(CLIPPED, precision="bf16-true"),
    "warm-up": replace(CLIPPED, warm_up=5),
    "frozen and unfrozen": replace(
        CLIPPED, model="FreezingModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}
    ),
    "changes, everything": replace(CLIPPED, steps=28, schedules=HISTORY).with_keys(
        **{**EVERYTHING, "select_interval": 5}
    ),
    "every block": replace(CLIPPED, schedules=((BEGIN, 1, 0, tuple(range(15))),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_exact_state_is_adamws(name: str) -> None:
    run, expected = run_here(CASES[name]), run_here(CASES[name].exact())
    assert_same_state(run, expected)
    assert_same_tensors(run.weights, expected.weights, "the weight at the end")


SCHEDULES = {
    "S=1": (TAIL,),
    "S=2": ((BEGIN, 2, 0, LAST),),
    "it grows, S changes": ((BEGIN, 1, 0, LAST[:2]), (5, 1, 0, LAST), (8, 2, 0), (11, 1, 0, (*LAST, 7))),
}
OF_SHAPES = {
    "prime sizes": SHAPES[:6],
    "one row, one column": ((1, 300), (211, 1), (17,)),
    "fewer elements than blocks": ((2, 3), (1,)),
    "four dimensions": ((5, 4, 3, 2), (64, 3), (7,)),
}


class ReadsState(pl.Callback):
    """Reads the exact state after some steps: {step: [kind][parameter]}."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.states: dict[int, list[list[Tensor]]] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        assert isinstance(pl_module, TestModule)
        step = trainer.global_step
        if step in self.steps and step not in self.states:
            parameters = [p for group in pl_module.parameter_groups() for p in group]
            moments = [
                [safe_get_full_optimizer_state(p, kind) for p in parameters] for kind in ("exp_avg", "exp_avg_sq")
            ]
            self.states[step] = [[safe_get_full_fp32_param(p) for p in parameters], *moments]


def history(case: Case, factors: Sequence[float]) -> list[list[list[Tensor]]]:
    """[step][kind][parameter]: the oracle's states before all steps and after each.

    Args:
        case: of gradients that do not depend on weights.
        factors: of clipping, by step.
    """
    weights, gradients, groups = case.fixed_gradients()
    oracle = ReplayedAdamW(master=weights, elements=[])
    states = [[oracle.master[:], oracle.exp_avg[:], oracle.exp_avg_sq[:]]]
    for of_step, of_groups, factor in zip(gradients, groups, factors, strict=True):
        oracle.step(of_step, of_groups, factor)
        states.append([oracle.master[:], oracle.exp_avg[:], oracle.exp_avg_sq[:]])
    return states


def assert_same_states(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]], when: str) -> None:
    for kind, *tensors in zip(("master", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
        assert_same_tensors(*tensors, f"{when}: {kind}")


def check(shapes: str, schedule: str, *, keys: dict[str, object]) -> None:
    """With kills in every step, and flushes, after which each state is compared."""
    model_options = {"shapes": OF_SHAPES[shapes]}
    case = replace(CLIPPED, model_options=model_options, schedules=SCHEDULES[schedule])
    reader, killer = ReadsState((5, 6, 10)), KillsWorker(seed=1)
    run = run_here(case.with_keys(max_worker_restarts=1000, **keys), callbacks=[reader, killer])
    assert killer.kills >= case.steps
    states = history(case, run.factors)
    assert reader.states.keys() == set(reader.steps)
    for step, state in reader.states.items():
        assert_same_states(state, states[step], f"after step {step}")
    assert_same_states([run.master, run.exp_avg, run.exp_avg_sq], states[-1], "at the end")
    assert_same_tensors(run.weights, states[-1][0], "the weight at the end")


def test_states_after_flushes_and_kills_are_the_oracles() -> None:
    check("prime sizes", "S=1", keys={})


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, EVERYTHING], ids=["exact", "everything"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shapes", OF_SHAPES)
def test_states_after_flushes_and_kills_in_every_shape(shapes: str, schedule: str, keys: dict[str, object]) -> None:
    check(shapes, schedule, keys=keys)


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


@pytest.mark.parametrize("topk_ratio", [0.0, 0.3])
def test_a_tail_without_memory_is_dropped(
    topk_ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is resumed where the device has less room: its blocks are the worker's again, and no bit of the exact state is lost."""
    saved = replace(
        CLIPPED, topk_ratio=topk_ratio, schedules=((BEGIN, 2, 0, LAST),), save_at=8, checkpoint=str(tmp_path / "8.ckpt")
    )
    whole, shares = run_here(saved), TailShares()
    monkeypatch.setattr(auto_control, "has_room", lambda *_: False)
    rest = run_here(replace(saved, save_at=0, schedules=()), callbacks=[shares])
    assert_same_state(rest, whole)
    assert shares.seen == [0] * 6
    assert "has no room for 3 blocks that it owned" in caplog.text


@pytest.mark.parametrize(
    ("keys", "room", "owns"), [({}, True, True), ({}, False, False), ({"tail": "device"}, False, True)]
)
def test_who_owns_it(keys: dict[str, Any], room: bool, owns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(auto_control, "has_room", lambda n_bytes, _: asked.append(n_bytes) or room)
    partition = make_partition()
    rank = make_rank_state(partition, [torch.zeros(n + 1, dtype=torch.bfloat16) for n in COUNTS])
    policy = SchedulePolicy(candidates_of([1], [0, 1]), hides_in_backward=True, allows_tail=True)
    control = auto_control.ScheduleControl(
        policy, ZenFlowConfig(**keys), rank, Arrivals(partition), group=cast(dist.ProcessGroup, None)
    )
    control.load_state_dict({**policy.state_dict(), "tail": 0.5, "tail_blocks": [0, 2]})
    assert control.tail == ({0, 2} if owns else set())
    numel = sum(partition.blocks[block].end - partition.blocks[block].begin for block in (0, 2))
    # fp32 weights and both moments, and a gradient.
    assert asked == ([] if keys else [numel * (3 * 4 + 2)])
    rank.arena.close(keep_state=False)


def test_two_ranks() -> None:
    """Each rank has a tail of its own; on the second one other parameters arrive last."""
    cases = {"both": CLIPPED, "one": replace(CLIPPED, schedules=((*TAIL, 1),))}
    runs = run_on_ranks({**cases, "exact": CLIPPED.exact()})
    for run in (run for name in cases for run in runs[name]):
        assert_same_state(run, runs["exact"][0])
        assert_same_tensors(run.weights, runs["exact"][0].weights, "the weight at the end")
