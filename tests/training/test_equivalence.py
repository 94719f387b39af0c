"""For one sequence of gradients, the state after a flush is AdamW's, whatever was updated where and when: also with clipping and gradients
that are not finite, zero, denormal or near the end of their type's range. Step by step, losses and shown weights are the oracle's.
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_optimizer_in_backward import HALF, PREDICTED
from test_provisional_update import CASES as PROVISIONAL
from torch import Tensor

from direct_step import direct_step
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, run_here
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.core.partition import round_up
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import Block, StepContext
from models import LinearLossModule, OptimizerOptions, hyperparameters
from same_bits import assert_as_promised, assert_is_adamw, assert_same_run, compare_with_oracle

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
    **{sequence: case_of(sequence, 0.05, 7, 1) for sequence in SEQUENCES},
    "warm-up to the end": case_of("fp32", 0, 4, 1, warm_up=100),
    **{
        f"shapes {shapes}": case_of("fp32", 0.3, s, 1, model_options={"shapes": shapes})
        # The second has a vector that is too large to be handled with others.
        for shapes, s in ((((1, 1), (1,), (700, 1), (3, 500)), 7), (((31, 29), (70_000,), (5,)), 4))
    },
    "everything": case_of(ACCUMULATED, 0.3, 4, 1, flush_after=(5,)).with_keys(**EVERYTHING),
    "changes of schedule": case_of(BF16, 0.3, 1, 0, schedules=((2, 4, 1), (4, 1, 0), (5, 2, 1), (8, 1, 1))).with_keys(
        **AUTO, **EVERYTHING
    ),
}
"""What lies between these, tests/fuzz draws."""


BUCKETS: dict[str, tuple[Case, int | None]] = {
    # Gradients that are reduced together; in many small buckets beside parameters that fill a bucket alone; one after the other.
    "all": (CASES["everything"], None),
    "400": (CASES["everything"], 400),
    "S=4, in backward": (PREDICTED["S=4, everything"], 200),
    "true factors": (HALF, 200),
    # Late layers' weights are updated while early ones' activations are still to be computed again.
    "checkpointing": (PROVISIONAL["frozen layers, checkpointing"], 50),
}
"""A case, and the size of buckets."""


@pytest.mark.parametrize("name", BUCKETS)
def test_lightning_gives_the_same_bits(name: str) -> None:
    case, bucket = BUCKETS[name]
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": 2 * bucket} if bucket else {}
    assert_same_run(run_here(case), run_here(replace(case, loop="trainer").with_keys(**sizes)))


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_oracle_is_torchs_adamw(kind: str) -> None:
    """Two groups, a scheduler, accumulated gradients, clipping: against torch's optimizers in float64."""
    case = Case(steps=STEPS, accumulate=3, max_norm=1.0, optimizer=OptimizerOptions(kind=kind))
    weights, gradients, groups = case.fixed_gradients()
    ours = case.adamw()
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
    case = case.with_keys(**APPROXIMATE, select_interval=5)
    assert_is_adamw(case, run_here(case))


ON_HOST = case_of(ACCUMULATED, 0.3, 4, 1).with_keys(**APPROXIMATE)
SUMS = {
    "flushes, reselection": replace(ON_HOST, flush_after=(2, 5)).with_keys(**EVERYTHING),
    "frozen between micro-batches": replace(ON_HOST, model_options={"frozen_in": {0: (3, 6), 3: (4, 9)}, "micro": 1}),
    "a network in bf16": replace(ON_HOST, model="SmallNet", precision="bf16-true", update_interval=1),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_host_memory_have_the_bits_of_the_devices(name: str) -> None:
    host, device = (run_here(SUMS[name].with_keys(accumulate_on=where)) for where in ("host", "device"))
    assert_same_run(host, device)
    assert_is_adamw(SUMS[name], host)


@pytest.mark.parametrize(
    ("where", "room", "on_host"),
    [("auto", True, False), ("auto", False, True), ("device", False, False), ("host", True, True)],
)
def test_where_sums_are(where: str, room: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host sums cross PCIe both ways; "auto" takes the device where that has room for them."""
    # Of one matrix that blocks cut.
    numel = round_up(30)
    monkeypatch.setattr(HostRuntime, "room", lambda _: 4 * numel - (not room))
    with direct_step(
        [[torch.zeros(10, 3)]], update_interval=2, publish_lag=1, topk_ratio=0, accumulate_on=where
    ) as direct:
        traffic = direct.parts.rank.telemetry
        for _ in range(3):
            direct.backward([torch.ones(10, 3)], last=False)
        assert (traffic.d2h_bytes, traffic.h2d_bytes) == ((3 * 4 * 30, 2 * 4 * 30) if on_host else (0, 0))
        direct.backward([torch.ones(10, 3)])
        assert torch.equal(direct.parts.fill.gradient(0), torch.full((30,), 4.0))
        assert direct.parts.rank.partition.numel == numel


HOSTILE_STEP = 3
"""Counted from 0: in mid-window, after the selection."""

APPLIED = (0.0, 1e-40, 1e17)
SKIPPED = (math.nan, -math.inf, 3e18, 1e38)
"""Factors on the loss of one step, and with it on its gradients, whose norm is 30 before: above 1.8e19 its square is not in float32."""

BASE = Case(steps=9, topk_ratio=0.3, strategy_options=APPROXIMATE, loop="direct")


def hostile(factor: float, *steps: int, **options: Any) -> Case:
    factors = {"factors": dict.fromkeys(steps or (HOSTILE_STEP,), factor)}
    return replace(BASE, **{**options, "model_options": {**factors, **options.get("model_options", {})}})


VECTOR = replace(
    BASE,
    model_options={"frozen_in": {3: (2, 6)}, "not_finite": {(1, 0): math.inf}, "not_finite_in": 3},
    max_norm=1.0,
)
HOSTILE = {
    **{f"{factor}": hostile(factor) for factor in (*APPLIED, *SKIPPED)},
    "1e+17, bf16": hostile(1e17, precision="bf16-true", max_norm=1.0),
    "nan, everything": hostile(math.nan, accumulate=2, max_norm=1.0).with_keys(select_interval=3),
    "never finite": hostile(math.nan, *range(9)),
    "one element of 3e38": replace(
        BASE, precision="bf16-true", max_norm=1.0, model_options={"not_finite": {(HOSTILE_STEP, 0): 3e38}}
    ),
    # Nothing is left of it in the next steps, in which the vector is frozen.
    **{f"a vector, S={s}, d={d}": replace(VECTOR, update_interval=s, publish_lag=d) for s, d in ((4, 1), (1, 0))},
}


NETWORK = Case(model="SmallNet", optimizer=OptimizerOptions(lr=3e-3), steps=14, topk_ratio=0.3, loop="direct")
FROZEN_IN = {0: (4, 8), 2: (0, 5), 3: (6, 12), 4: (6, 20)}
FREEZING = replace(NETWORK, model="LinearLossModule", model_options={"frozen_in": FROZEN_IN})
STEP_BY_STEP = {
    "defaults": replace(NETWORK, topk_ratio=0.05),
    "long windows": replace(NETWORK, topk_ratio=0.5, update_interval=7),
    "in backward": replace(NETWORK, update_interval=2, publish_lag=0),
    "flushes": replace(NETWORK, update_interval=1, warm_up=2, flush_after=(3, 9, 10)),
    "accumulated, clipped": replace(NETWORK, topk_ratio=0.2, accumulate=3, max_norm=0.5),
    # Of what is thawed, device-owned or not, AdamW counts the steps anew, or on. The warm-up is not repeated.
    "frozen and thawed": replace(FREEZING, update_interval=2, warm_up=3),
    # Of the step that decides the selection; the next one that is finite does instead. Of the last one a vector alone is not.
    **{
        f"steps {steps} are not finite": Case(
            steps=10,
            topk_ratio=0.3,
            warm_up=warm_up,
            model_options={"not_finite": {(step, 0): math.nan for step in steps}, "not_finite_in": parameter},
            loop="direct",
        )
        for steps, warm_up, parameter in (((0, 1), 0, 0), ((2,), 3, 0), ((0,), 0, 3))
    },
}
for name, precision in (("defaults", "bf16-true"), ("flushes", "bf16-mixed")):
    STEP_BY_STEP[f"{name}, {precision}"] = replace(STEP_BY_STEP[name], precision=precision)
"""What lies between these, tests/fuzz draws."""
NOT_FINITE = {"not_finite": {(3, 0): math.inf, (6, 0): math.nan}, "not_finite_in": 2}
CLIPPED = {
    "clipped": replace(NETWORK, update_interval=2, publish_lag=0, max_norm=0.5),
    "clipped, nothing late": replace(NETWORK, update_interval=1, publish_lag=0, max_norm=0.5, accumulate=2),
    "not finite": replace(FREEZING, update_interval=2, publish_lag=0, max_norm=0.5, model_options=NOT_FINITE),
    "not finite, not clipped": replace(FREEZING, update_interval=1, publish_lag=0, model_options=NOT_FINITE),
}
"""Blocks are submitted in backward, with factors that differ from the true ones."""


class OnlyLast(LinearLossModule):
    """Trains a matrix that has no gradient in every other step."""

    def optimized(self) -> list[list[torch.nn.Parameter]]:
        return [[self.weights[6]]]


WITHOUT_GRADIENTS = {
    f"no gradient at all, S={s}, d={d}": Case(
        model=OnlyLast,
        optimizer=OptimizerOptions(given=[hyperparameters(lr=0.1)]),
        steps=6,
        update_interval=s,
        publish_lag=d,
    )
    for s, d in ((1, 0), (4, 1))
}
"""Which counts as one of zero."""
ALL = WITHOUT_GRADIENTS | CASES | HOSTILE | STEP_BY_STEP | PROVISIONAL


@pytest.mark.parametrize("name", ALL)
def test_state_and_shown_weights(name: str) -> None:
    """What the flush leaves is AdamW to the bit, and what the model shows stays finite."""
    run = run_here(ALL[name])
    assert_as_promised(ALL[name], run)
    if name.split(",")[0] in map(str, (*APPLIED, *SKIPPED)):
        assert run.skipped == (float(name.split(",")[0]) not in APPLIED)


@pytest.mark.parametrize("name", CLIPPED)
def test_every_step_has_the_predicted_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown weights of a block that is submitted in backward, and nothing else. Factors are near the true ones; from the first gradient
    on that is not finite they are NaN.
    """
    case, submit = CLIPPED[name], JobQueue.submit_in_backward
    predicted: list[dict[int, float]] = [{} for _ in range(case.steps)]

    def noted(self: JobQueue, block: Block, context: StepContext, word: Tensor) -> None:
        predicted[context.number - 1][block.number] = float(word.view(torch.float32)[0])
        submit(self, block, context, word)

    monkeypatch.setattr(JobQueue, "submit_in_backward", noted)
    run = run_here(case)
    ratios = [[factor / true for factor in of.values()] for of, true in zip(predicted, run.factors, strict=True)]
    of_finite = [ratio for of_step in ratios for ratio in of_step if not math.isnan(ratio)]
    assert sum(ratio != 1 for of_step in ratios for ratio in of_step) >= 10
    assert statistics.fmean(of_finite) == pytest.approx(1, abs=0.1)
    for of_step in (of for of, true in zip(predicted, run.factors, strict=True) if math.isnan(true)):
        are_nan = [math.isnan(factor) for factor in of_step.values()]
        assert are_nan == sorted(are_nan) and any(are_nan) and not all(are_nan)
    compare_with_oracle(case, [run], predicted)
    with pytest.raises(AssertionError):
        compare_with_oracle(case, [run])


def test_the_oracle_tells_settings_apart() -> None:
    """A lag, window or selection that is off by one shows: the comparison above is not one that everything passes."""
    runs = [run_here(STEP_BY_STEP["defaults"])]
    for wrong in ({"publish_lag": 0}, {"update_interval": 3}, {"topk_ratio": 0.2}, {"warm_up": 2}, {"topk_ratio": 0}):
        with pytest.raises(AssertionError):
            compare_with_oracle(replace(STEP_BY_STEP["defaults"], **wrong), runs)


def test_each_gradient_is_let_go_when_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward: kept to its end, the gradients would take as much device memory as the model."""
    copy, held = ZenFlowZeroOptimizer.copy_grads_in_partition, []

    def watched(self: ZenFlowZeroOptimizer, param: Tensor, *args: object) -> None:
        copy(self, param, *args)  # type: ignore[arg-type]
        held.append(param.grad is not None)

    monkeypatch.setattr(ZenFlowZeroOptimizer, "copy_grads_in_partition", watched)
    run_here(replace(NETWORK, loop="trainer", steps=2, accumulate=2))
    assert held and not any(held)
