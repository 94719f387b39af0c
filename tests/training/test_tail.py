"""Blocks whose gradients come too late in backward: a lag of one step for them alone, or device-owned entirely."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from harness import AUTO, EVERYTHING, Case, Run, run_here
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.step import tail
from lightning_zenflow.step.arrivals import Arrivals
from rank_processes import run_on_ranks
from rank_states import make_rank_state
from reference import blocks_of_elements
from same_bits import assert_same_run, assert_same_state, assert_same_tensors
from small_arena import COUNTS, make_partition
from worker_killer import KillsWorker, optimizer_of

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

N_BLOCKS = 16
LAST = (0, 1, 2)
BEGIN = 3
LAG, DEVICE = (BEGIN, 1, 0, LAST, False), (BEGIN, 1, 0, LAST, True)
CASE = Case(steps=14, topk_ratio=0.3, schedules=(LAG,), strategy_options={**AUTO, "tail": "lag"})
CLIPPED = replace(CASE, max_norm=1.0)
HISTORY = (
    (BEGIN, 1, 0, LAST[:2], True),
    (6, 2, 0),
    (9, 2, 1),
    (12, 1, 0, (*LAST, 7), True),
    (16, 4, 0),
    (21, 1, 0),
)
CASES = {
    "lag": CASE,
    "lag, clipped": CLIPPED,
    "device": replace(CASE, schedules=(DEVICE,)),
    "device, clipped": replace(CLIPPED, schedules=(DEVICE,)),
    "S=2, lag": replace(CLIPPED, schedules=((BEGIN, 2, 0, LAST, False),)),
    "S=2, device": replace(CLIPPED, schedules=((BEGIN, 2, 0, LAST, True),)),
    "nothing else on the device": replace(CLIPPED, topk_ratio=0, schedules=(DEVICE,)),
    "accumulated": replace(CLIPPED, accumulate=2),
    "accumulated on the host, device": replace(CLIPPED, accumulate=2, schedules=(DEVICE,)).with_keys(
        accumulate_on="host"
    ),
    "flushes": replace(CLIPPED, flush_after=(4, 5, 9)),
    "flushes, device": replace(CLIPPED, flush_after=(4, 5, 9), schedules=(DEVICE,)),
    "bf16": replace(CLIPPED, precision="bf16-true"),
    "warm-up": replace(CLIPPED, warm_up=5, schedules=(DEVICE,)),
    "frozen and unfrozen": replace(
        CLIPPED,
        model="FreezingModule",
        model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}},
        schedules=(DEVICE,),
    ),
    "changes, everything": replace(CLIPPED, steps=28, schedules=HISTORY).with_keys(
        **{**EVERYTHING, "select_interval": 5}
    ),
    "every block": replace(CLIPPED, schedules=((BEGIN, 1, 0, tuple(range(N_BLOCKS)), False),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_exact_state_is_adamws(name: str) -> None:
    run, expected = run_here(CASES[name]), run_here(CASES[name].exact())
    assert_same_state(run, expected)
    assert_same_tensors(run.weights, expected.weights, "the weight at the end")


def blocks(case: Case, *, world_size: int = 1) -> list[Tensor]:
    return blocks_of_elements(case.make_model().parameter_groups(), N_BLOCKS, world_size)


def assert_shows(run: Run, exact: Run, late: list[Tensor]) -> None:
    """Shown weights are AdamW's, and where they are late those of a step before."""
    for step, shown in enumerate(run.shown):
        for i, weights in enumerate(shown):
            lag = late[i] & (step > BEGIN)
            assert torch.equal(weights, torch.where(lag, exact.shown[max(0, step - 1)][i], exact.shown[step][i]))


def test_only_the_tail_is_late_and_nothing_is_where_the_device_owns_it() -> None:
    case = replace(CASE, topk_ratio=0)
    exact = run_here(case.exact())
    late = [torch.isin(b, torch.tensor(LAST)) for b in blocks(case)]
    assert any(of_parameter.any() for of_parameter in late)
    assert_shows(run_here(case), exact, late)
    owned = run_here(replace(case, schedules=(DEVICE,)))
    assert_shows(owned, exact, [torch.zeros_like(of_parameter) for of_parameter in late])


class Readings(pl.Callback):
    """How many blocks the counters say the tail has, and whether the device owns it, after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer = optimizer_of(trainer)
        reading = optimizer.counters.read(worker_pid=None)
        self.seen.append((reading.tail_share * optimizer.parts.jobs.staggered.n_blocks, reading.owns_tail))


@pytest.mark.parametrize("on_device", [False, True], ids=["lag", "device"])
def test_what_the_counters_say_of_it(on_device: bool) -> None:
    """Decided after step `BEGIN`; the device owns it from the end of the next step on."""
    readings = Readings()
    run_here(replace(CASE, steps=6, schedules=((BEGIN, 1, 0, LAST, on_device),)), callbacks=[readings])
    n = pytest.approx(len(LAST))
    assert readings.seen == [(0, False)] * 2 + [(n, False)] + [(n, on_device)] * 3


@pytest.mark.parametrize(
    ("keys", "room", "owns"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"tail": "lag"}, True, False),
        ({"tail": "device"}, False, True),
    ],
)
def test_who_owns_it(keys: dict[str, Any], room: bool, owns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(tail, "has_room", lambda n_bytes, _: asked.append(n_bytes) or room)
    partition = make_partition()
    rank = make_rank_state(partition, [torch.zeros(n + 1, dtype=torch.bfloat16) for n in COUNTS])
    candidates = tail.TailCandidates(ZenFlowConfig(**keys), rank, Arrivals(partition))
    assert candidates.device_can_own({0, 2}) == owns
    numel = sum(partition.blocks[block].end - partition.blocks[block].begin for block in (0, 2))
    # fp32 weights and both moments, and a gradient.
    assert asked == ([] if keys else [numel * (3 * 4 + 2)])
    rank.arena.close(keep_state=False)


def test_provisional_updates_and_weight_prediction_are_the_tails_alone() -> None:
    """The others still show AdamW's own bits; the tail shows neither those nor the weights of a step before."""
    case = replace(CASE, topk_ratio=0).with_keys(weight_prediction="auto", provisional_scale="auto")
    exact, run = run_here(case.exact()), run_here(case)
    for b, *shown in zip(blocks(case), run.shown[-1], exact.shown[-1], exact.shown[-2], strict=True):
        ours, now, before = shown
        late = torch.isin(b, torch.tensor(LAST))
        assert torch.equal(ours[~late], now[~late])
        if late.any():
            assert not torch.equal(ours[late], now[late])
            assert not torch.equal(ours[late], before[late])


@pytest.mark.parametrize("on_device", [False, True], ids=["lag", "device"])
def test_a_resumed_run_continues_bit_for_bit(on_device: bool, tmp_path: Path) -> None:
    case = replace(CLIPPED, model="SmallNet", schedules=((BEGIN, 1, 0, LAST, on_device),)).with_keys(**EVERYTHING)
    saved = replace(case, save_at=8, checkpoint=str(tmp_path / "8.ckpt"))
    whole = run_here(saved)
    rest = run_here(replace(saved, save_at=0, schedules=((100, 1, 0),)))
    assert len(rest.shown) == case.steps - 8
    assert_same_state(rest, whole)
    assert rest.losses == whole.losses[8:]


@pytest.mark.parametrize("on_device", [False, True], ids=["lag", "device"])
def test_a_killed_worker_changes_no_bit(on_device: bool) -> None:
    case = replace(CLIPPED, model="SmallNet", schedules=((BEGIN, 1, 0, LAST, on_device),)).with_keys(
        **EVERYTHING, max_worker_restarts=1000
    )
    killer = KillsWorker(seed=1)
    run = run_here(case, callbacks=[killer])
    assert killer.kills > 0
    assert_same_run(run, run_here(case))


def test_two_ranks() -> None:
    """Each rank has a tail of its own; on the second one other parameters arrive last."""
    # Columns are selected where a tail lags; all ranks do it together, also those that have no tail.
    entries = {"lag": LAG, "device": DEVICE, "lag, on one rank": (*LAG, 1), "device, on one rank": (*DEVICE, 1)}
    cases = {name: replace(CLIPPED, schedules=(entry,)) for name, entry in entries.items()}
    runs = run_on_ranks({**cases, "exact": CLIPPED.exact()})
    for name in cases:
        for run in runs[name]:
            assert_same_state(run, runs["exact"][0])
            assert_same_tensors(run.weights, runs["exact"][0].weights, "the weight at the end")
