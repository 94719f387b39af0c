"""For one sequence of gradients, the state after a flush is AdamW's, whatever was updated where and when."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from direct_step import direct_step
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, fit, run_here
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.offload.plan import StepInputs
from models import OptimizerOptions
from oracle import adamw_reference
from same_bits import assert_is_adamw, assert_same_run, assert_same_tensors

STEPS = 11
"""No multiple of any update interval but 1, so that windows are open at the end."""

BY_ADAM = OptimizerOptions(kind="Adam")
SEQUENCES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, accumulated, clipped": {"accumulate": 3, "max_norm": 1.0},
    "bf16, clipped": {"precision": "bf16-true", "max_norm": 1.0},
    "bf16-mixed, accumulated, Adam": {"precision": "bf16-mixed", "accumulate": 3, "optimizer": BY_ADAM},
    "fp32, clipped, Adam, no scheduler": {"max_norm": 1.0, "optimizer": replace(BY_ADAM, scheduler=False)},
}
"""Everything that the sequence of gradients and the optimizer depend on."""


def case_of(sequence: str, topk_ratio: float, s: int, d: int, **options: Any) -> Case:
    fields = {**SEQUENCES[sequence], "steps": STEPS, "loop": "direct", **options}
    return Case(topk_ratio=topk_ratio, update_interval=s, publish_lag=d, **fields)


BF16, ACCUMULATED = "bf16, clipped", "fp32, accumulated, clipped"
FLUSHES = {"flush_after": (1, 2, 5, 9)}
CASES = {
    **{sequence: case_of(sequence, 0.05, 7, 3) for sequence in SEQUENCES},
    "warm-up to the end": case_of("fp32", 0, 4, 1, warm_up=100),
    **{
        f"shapes {shapes}": case_of("fp32", 0.3, s, 1, model_options={"shapes": shapes})
        # The second has a vector that is too large to be handled with others.
        for shapes, s in ((((1, 1), (1,), (700, 1), (3, 500)), 7), (((31, 29), (70_000,), (5,)), 4))
    },
    "everything": case_of(ACCUMULATED, 0.3, 4, 2, flush_after=(5,)).with_keys(**EVERYTHING),
    "changes of schedule": case_of(BF16, 0.3, 1, 0, schedules=((2, 4, 1), (4, 1, 0), (5, 2, 2), (8, 1, 1))).with_keys(
        **AUTO, **EVERYTHING
    ),
}
"""What lies between these, tests/fuzz draws."""


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_adamws_to_the_bit(name: str) -> None:
    assert_is_adamw(CASES[name], run_here(CASES[name]))


@pytest.mark.parametrize("bucket", [None, 400])
def test_lightning_gives_the_same_bits(bucket: int | None) -> None:
    """With gradients that are reduced together, and in many small buckets beside parameters that fill a bucket alone."""
    case = CASES["everything"]
    buckets = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket} if bucket else {}
    assert_same_run(run_here(case), run_here(replace(case, loop="trainer").with_keys(**buckets)))


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_oracle_is_torchs_adamw(kind: str) -> None:
    """Two groups, a scheduler, accumulated gradients, clipping: against torch's optimizers in float64."""
    case = Case(steps=STEPS, accumulate=3, max_norm=1.0, optimizer=OptimizerOptions(kind=kind))
    weights, gradients, groups = case.fixed_gradients()
    ours = adamw_reference(weights, gradients, groups, max_norm=1.0)
    theirs = [torch.nn.Parameter(w.double()) for w in weights]
    optimizer = getattr(torch.optim, kind)([{"params": [p]} for p in theirs])
    for of_step, groups_of_step in zip(gradients, groups, strict=True):
        for p, gradient, entry, h in zip(theirs, of_step, optimizer.param_groups, groups_of_step, strict=True):
            p.grad = gradient.double()
            entry.update(lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
        # torch's clipping adds 1e-6 to the norm as well.
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
    for i, p in enumerate(theirs):
        torch.testing.assert_close(ours.weights[i], p.detach())
        torch.testing.assert_close(ours.exp_avg[i], optimizer.state[p]["exp_avg"])
        torch.testing.assert_close(ours.exp_avg_sq[i], optimizer.state[p]["exp_avg_sq"])


def test_the_warm_up_is_not_repeated() -> None:
    """A change of `requires_grad` starts over all but the steps that have been counted."""
    weights, synchronous = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2)], []
    inputs = StepInputs(groups=(), loss_scale=1.0, max_norm=0.0)
    with direct_step([weights], topk_ratio=0, update_interval=4, publish_lag=1, full_warm_up_rounds=3) as direct:
        for number in range(1, 9):
            weights[0].requires_grad_(number not in (2, 6))
            direct.step.follow_freezing()
            synchronous.append(direct.parts.planner.plan(number, inputs).synchronous)
            direct.backward([torch.ones(6, 4)] * 2)
            direct.step.step()
    assert synchronous == [True] * 3 + [False] * 5


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_passes_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's and Triton's passes the state is AdamW's in the same sense."""
    if name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter needs a machine without a CUDA device")
    monkeypatch.setenv("ZENFLOW_KERNELS", name)
    # Few shapes, since the interpreter is slow.
    few = {"shapes": ((31, 29), (8, 3, 3, 5), (37,))}
    case = case_of(BF16, 0.3, 4, 1, accumulate=2, steps=8, model_options=few)
    case = case.with_keys(**APPROXIMATE, select_interval=3)
    assert_is_adamw(case, run_here(case))


ON_HOST = case_of(ACCUMULATED, 0.3, 4, 1).with_keys(**APPROXIMATE)
SUMS = {
    "flushes, reselection": replace(ON_HOST, flush_after=(2, 5)).with_keys(**EVERYTHING),
    "frozen between micro-batches": replace(ON_HOST, model_options={"frozen_in": {0: (3, 6), 3: (4, 9)}, "micro": 1}),
    "a network in bf16": replace(ON_HOST, model="SmallNet", precision="bf16-true", publish_lag=3),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_host_memory_have_the_bits_of_the_devices(name: str) -> None:
    host, device = (run_here(SUMS[name].with_keys(accumulate_on=where)) for where in ("host", "device"))
    assert_same_run(host, device)
    assert_is_adamw(SUMS[name], host)


def test_flushes_between_micro_batches() -> None:
    """Validation in mid-step: what is added up so far belongs to no window yet."""
    weights = []
    for where in ("host", "device"):
        case = ON_HOST.with_keys(accumulate_on=where, reduce_bucket_size=400)
        model = case.make_model()
        validates = {"limit_val_batches": 1, "val_check_interval": 2}
        fit(model, case.make_strategy(), steps=6, accumulate_grad_batches=case.accumulate, **validates)
        weights.append([p.detach() for p in model.parameters()])
    assert_same_tensors(*weights)


@pytest.mark.parametrize(
    ("where", "room", "on_host"),
    [("auto", True, False), ("auto", False, True), ("device", False, False), ("host", True, True)],
)
def test_where_sums_are(where: str, room: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host sums cross PCIe both ways; "auto" takes the device where that has room for them."""
    asked = []
    monkeypatch.setattr(HostRuntime, "has_room", lambda _, n_bytes: asked.append(n_bytes) or room)
    # Of one matrix that blocks cut.
    with direct_step(
        [[torch.zeros(10, 3)]], update_interval=2, publish_lag=1, topk_ratio=0, accumulate_on=where
    ) as direct:
        traffic = direct.parts.rank.telemetry
        for _ in range(3):
            direct.backward([torch.ones(10, 3)], last=False)
        assert (traffic.d2h_bytes, traffic.h2d_bytes) == ((3 * 4 * 30, 2 * 4 * 30) if on_host else (0, 0))
        direct.backward([torch.ones(10, 3)])
        assert torch.equal(direct.parts.fill.gradient(0), torch.full((30,), 4.0))
        assert asked == ([4 * direct.parts.rank.partition.numel] if where == "auto" else [])
