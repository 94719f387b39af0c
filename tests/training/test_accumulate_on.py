"""Gradients added up in host memory: the same bits as on the device, and no memory of the device for the sums."""

from dataclasses import replace

import pytest
import torch

from direct_step import direct_step
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, make_trainer, run_here
from lightning_zenflow.offload import fill
from same_bits import assert_is_adamw, assert_same_run, assert_same_tensors

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

BASE = Case(steps=9, accumulate=3, max_norm=1.0, topk_ratio=0.3, loop="direct").with_keys(**APPROXIMATE)
CASES: dict[str, Case] = {
    "defaults": BASE,
    "bf16": replace(BASE, precision="bf16-true"),
    "two micro-batches, long lag": replace(BASE, accumulate=2, publish_lag=3),
    "synchronous": replace(BASE, update_interval=1, publish_lag=0, warm_up=4),
    "flushes, reselection": replace(BASE, flush_after=(2, 5)).with_keys(**EVERYTHING),
    "changes of schedule": replace(BASE, schedules=((3, 8, 1), (6, 1, 0))).with_keys(**AUTO),
    "not finite": replace(BASE, model_options={"not_finite": {(4, 0): float("nan")}}),
    "frozen in mid-run": replace(
        BASE, model="LinearLossModule", model_options={"frozen_in": {0: (3, 6), 3: (4, 9)}, "micro": 1}
    ),
    "training": replace(BASE, model="SmallNet"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_gives_the_same_bits_as_the_device(name: str) -> None:
    host, device = (run_here(CASES[name].with_keys(accumulate_on=where)) for where in ("host", "device"))
    assert_same_run(host, device)
    assert_is_adamw(CASES[name], host)


def test_flushes_between_micro_batches() -> None:
    """Validation in mid-step: what is added up so far belongs to no window yet."""
    weights = []
    for where in ("host", "device"):
        case = BASE.with_keys(accumulate_on=where, reduce_bucket_size=400)
        model = case.make_model()
        validates = {"limit_val_batches": 1, "val_check_interval": 2}
        options = {"max_steps": case.steps, "accumulate_grad_batches": case.accumulate, **validates}
        make_trainer(case.make_strategy(), **options).fit(model)
        weights.append([p.detach() for p in model.parameters()])
    assert_same_tensors(*weights)


@pytest.mark.parametrize(
    ("where", "room", "on_host"),
    [("auto", True, False), ("auto", False, True), ("device", False, False), ("host", True, True)],
)
def test_where_sums_are(where: str, room: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host sums cross PCIe both ways; "auto" takes the device where that has room for them."""
    asked = []
    monkeypatch.setattr(fill, "has_room", lambda n_bytes, _: asked.append(n_bytes) or room)
    # Of one matrix that blocks cut.
    with direct_step(
        [[torch.zeros(10, 3)]], update_interval=2, publish_lag=1, topk_ratio=0, accumulate_on=where
    ) as direct:
        traffic = direct.parts.step.rank.telemetry.traffic
        for _ in range(3):
            direct.backward([torch.ones(10, 3)], last=False)
        assert (traffic.d2h_bytes, traffic.h2d_bytes) == ((3 * 4 * 30, 2 * 4 * 30) if on_host else (0, 0))
        direct.backward([torch.ones(10, 3)])
        assert torch.equal(direct.step.gradient(0), torch.full((30,), 4.0))
        assert asked == ([4 * direct.parts.step.rank.partition.numel] if where == "auto" else [])
