"""Gradients added up in host memory: the same bits as on the device, and no memory of the device for the sums."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch

from harness import APPROXIMATE, AUTO, EVERYTHING, Case, make_trainer, run_here
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.memory import SlotPool
from lightning_zenflow.step import fill
from lightning_zenflow.step.fill import Accumulation
from rank_processes import run_on_ranks
from rank_states import make_rank_state
from same_bits import assert_same_run, assert_same_tensors

BASE = Case(steps=9, accumulate=3, max_norm=1.0, topk_ratio=0.3, strategy_options=APPROXIMATE)
CASES: dict[str, Case] = {
    "defaults": BASE,
    "bf16": replace(BASE, precision="bf16-true"),
    "two micro-batches, long lag": replace(BASE, accumulate=2, publish_lag=3),
    "synchronous": replace(BASE, update_interval=1, publish_lag=0, warm_up=4),
    "flushes": replace(BASE, flush_after=(2, 5)),
    "reselection": replace(
        BASE,
        strategy_options={**EVERYTHING},
    ),
    "changes of schedule": replace(
        BASE,
        schedules=((3, 8, 1), (6, 1, 0)),
        strategy_options={**APPROXIMATE, **AUTO},
    ),
    "not finite": replace(BASE, model_options={"not_finite": {(4, 0): float("nan")}}),
    "frozen in mid-run": replace(
        BASE, model="FreezingModule", model_options={"frozen_in": {0: (3, 6), 3: (4, 9)}, "micro": 1}
    ),
    "training": replace(BASE, model="SmallNet"),
    "small buckets": replace(BASE, strategy_options={**APPROXIMATE, "reduce_bucket_size": 400}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_gives_the_same_bits_as_the_device(name: str) -> None:
    host, device = (run_here(CASES[name].with_keys(accumulate_on=where)) for where in ("host", "device"))
    assert_same_run(host, device)


def test_flushes_between_micro_batches() -> None:
    """Validation in mid-step: what is added up so far belongs to no window yet."""
    weights = []
    for where in ("host", "device"):
        case = BASE.with_keys(accumulate_on=where)
        model = case.make_model()
        trainer = make_trainer(
            case.make_strategy(),
            max_steps=case.steps,
            accumulate_grad_batches=case.accumulate,
            limit_val_batches=1,
            val_check_interval=2,
        )
        trainer.fit(model)
        weights.append([p.detach() for p in model.parameters()])
    assert_same_tensors(*weights)


def test_two_ranks() -> None:
    names = ("bf16", "training")
    cases = {
        (name, where): CASES[name].with_keys(accumulate_on=where) for name in names for where in ("host", "device")
    }
    runs = run_on_ranks({" ".join(key): case for key, case in cases.items()})
    for name in names:
        for ours, theirs in zip(runs[f"{name} host"], runs[f"{name} device"], strict=True):
            assert_same_run(ours, theirs)


@pytest.mark.parametrize(
    ("where", "room", "on_host"),
    [("auto", True, False), ("auto", False, True), ("device", False, False), ("host", True, True)],
)
def test_sums(
    where: Literal["auto", "device", "host"], room: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one slice that blocks cut; "auto" takes the device where that has room for them."""
    asked = []
    monkeypatch.setattr(fill, "has_room", lambda n_bytes, _: asked.append(n_bytes) or room)
    piece = Slice(parameter=0, param_group=0, begin=0, start=0, numel=30, columns=3, is_matrix=True)
    partition = build_partition([piece], [30], 2)
    rank = make_rank_state(partition, [torch.zeros(30, dtype=torch.bfloat16)])
    slots = SlotPool(partition, rank.arena, rank.books)
    slots.grow(2)
    jobs = SimpleNamespace(acquire=lambda blocks, step: [slots.acquire(block) for block in blocks])
    sums = Accumulation(rank, slots, cast(JobQueue, jobs), where=where)
    gradients = [torch.randn(30, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
    for gradient in gradients[:3]:
        sums.add(0, gradient.clone(), 1)
    assert sums.pending == [0]
    total = sums.total(0, gradients[3].clone())
    assert torch.equal(total, gradients[3] + (gradients[0] + gradients[1] + gradients[2]))
    assert sums.pending == []
    assert asked == ([2 * partition.numel] if where == "auto" else [])
    n_bytes = 3 * 30 * 2 if on_host else 0
    traffic = rank.telemetry.traffic
    assert (traffic.d2h_bytes, traffic.h2d_bytes) == (n_bytes, n_bytes)
