"""Random modules, and random schedules and events, under random keys train with AdamW's bits."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from harness import AUTO, Case, run_here
from models import SHAPES, OptimizerOptions, decay, hyperparameters
from networks import TIED_NETS
from processes import shared_bytes
from random_modules import FLOAT32_ONLY, LAYERS, PARTS, Part, RandomNet
from same_bits import assert_as_promised, assert_is_adamw, shows_adamw

GROUPS = st.builds(
    hyperparameters,
    lr=st.sampled_from([0.0, 1e-8, 1e-4, 1e-3, 1e-2, 0.1]),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.9, 0.95, 0.999]),
    eps=st.sampled_from([1e-15, 1e-8, 1e-6, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.0731, 0.5]),
)


OPTIMIZERS = st.builds(
    OptimizerOptions,
    kind=st.sampled_from(["AdamW", "Adam"]),
    scheduler=st.booleans(),
    factor=st.sampled_from([decay, lambda step: min(1.0, step / 2)]),
    given=st.lists(GROUPS, min_size=1, max_size=2),
    flags=st.sampled_from([{}, {}, {"foreach": True}, {"foreach": False}, {"amsgrad": False}]),
)


@st.composite
def trainings(draw: st.DrawFn) -> Case:
    """All but the strategy."""
    steps = draw(st.integers(1, 4))
    drawn = tuple(draw(st.lists(PARTS, max_size=6)))
    precision = draw(st.sampled_from(["32-true", "32-true", "bf16-true", "bf16-mixed"]))
    layers = {part.kind for part in drawn}
    if layers & FLOAT32_ONLY:
        precision = "32-true"
    elif "spectral norm" in layers and precision == "bf16-mixed":
        # Its power iteration is in autocast's types, which the oracle does not have.
        precision = "bf16-true"
    return Case(
        model=RandomNet,
        model_options={"parts": drawn, "seed": draw(st.integers(0, 1000))},
        optimizer=draw(OPTIMIZERS),
        precision=precision,
        accumulate=draw(st.integers(1, 3)),
        max_norm=draw(st.sampled_from([None, None, 0, 1e-6, 0.1, 1.0, 1e6])),
        steps=steps,
        flush_after=tuple(draw(st.lists(st.integers(1, steps), unique=True, max_size=2))),
    )


SCHEDULES = st.sampled_from(
    [
        # Nothing late, by two ways; then S and d of every kind.
        {"update_interval": 1, "publish_lag": 0},
        {"update_interval": 1, "publish_lag": "auto", "overlap_step": False},
    ]
) | st.fixed_dictionaries(
    {
        "update_interval": st.integers(1, 8) | st.just("auto"),
        "publish_lag": st.sampled_from([0, 1, "auto"]),
    }
)
OTHERS = st.fixed_dictionaries(
    {
        "select_interval": st.sampled_from(["auto", 0, 1, 3]),
        "weight_prediction": st.sampled_from(["auto", "auto", 0, 1.0]),
        "provisional_scale": st.sampled_from(["auto", "auto", 0, 1.0]),
    },
    optional={
        "topk_ratio": st.sampled_from([0, 0.05, 0.3, 1]),
        "clip_prediction": st.sampled_from([True, False, False]),
        "select_strategy": st.sampled_from(["step", "epoch"]),
        "full_warm_up_rounds": st.integers(0, 3),
        "moments_dtype": st.sampled_from(["float32", "bfloat16", "int8"]),
        "accumulate_on": st.sampled_from(["auto", "device", "host"]),
        "offload_ratio": st.sampled_from([1.0, 0.7, 0.4, 0.0]),
        "reduce_bucket_size": st.sampled_from([1, 10, 1000]),
        "overlap_comm": st.booleans(),
    },
)


def train_and_check(case: Case) -> None:
    """Trains, and checks what the keys promise."""
    run = run_here(case)
    assert len(run.shown) == case.steps
    config = case.make_strategy().zenflow_config
    nothing_late = shows_adamw(case.with_keys(moments_dtype="float32"))
    if config.moments_dtype != "float32":
        # Moments are rounded where windows end, which is each step only if there are no longer ones, and of resident blocks at flushes.
        if (config.update_interval, config.publish_lag) != (1, 0) or config.offload_ratio not in ("auto", 1.0):
            assert all(torch.isfinite(p).all() for p in run.weights)
            return
        case = replace(case, update_interval=1, publish_lag=0)
    groups = case.optimizer.initial()
    # A second moment that forgets everything may be next to nothing, and multiplies rounding errors.
    atol = 1e-6 + 1e-4 * max(h.lr for h in groups) if all(h.beta2 for h in groups) else math.inf
    assert_is_adamw(case, run, shown=nothing_late, atol=atol)


def found(part: Part, *, seed: int, steps: int = 1, **options: Any) -> Case:
    case = Case(model=RandomNet, model_options={"parts": (part,), "seed": seed}, steps=steps, **options)
    return case.with_keys(update_interval=1, publish_lag=0, overlap_step=False)


FOUND = {
    # torch's kernel of a grouped convolution depends on strides of dimensions of one element, which `contiguous` leaves as they are.
    "frozen grouped convolution in channels_last": found(
        Part(kind="conv2d in groups", layout="channels_last", frozen="first"), seed=422
    ),
    # Of a frozen weight in every second place of memory, too.
    "GRU with a sliced frozen weight": found(Part(kind="GRU", sizes=(13, 1), layout="sliced", frozen="first"), seed=6),
    # One weight is -2e-5 in the step without a gradient: its update is divided by its decay alone, and multiplies its rounding error.
    "Adam without memory of squares": found(
        Part(kind="raw", shape=(7,), used="even steps"),
        seed=271,
        steps=3,
        optimizer=OptimizerOptions(
            kind="Adam", scheduler=False, given=[hyperparameters(lr=0.1, beta2=0.0, weight_decay=0.5)]
        ),
    ),
}
"""What random trainings have found, as small as it still fails."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    train_and_check(FOUND[name])


@pytest.mark.parametrize("frozen", ["none", "all", "vectors", "first"])
def test_each_layer_in_16_bits(frozen: str) -> None:
    """Beside others in float32, with the precision "32-true"."""
    for kind in LAYERS:
        train_and_check(found(Part(kind=kind, frozen=frozen, dtype=torch.bfloat16), seed=1))


FROZEN = st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 8), st.integers(2, 16)), max_size=2)
"""First and last step, by parameter; the last parameter has no gradient in every second step."""
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf, 3e38])
HOSTILE = st.sampled_from([0.0, 1e-40, math.nan, 3e18])
"""On the gradients of a step."""
KEYS = {
    "select_interval": st.sampled_from([0, 1, 3, "auto"]),
    "weight_prediction": st.sampled_from([0, "auto", 1.0]),
    "provisional_scale": st.sampled_from([0, "auto", 1.0]),
}
EVERY_STEP = {key: st.just(0) for key in KEYS}
"""With which the oracle has what is shown in every step."""


@st.composite
def schedules(draw: st.DrawFn) -> Case:
    """Every S, d, number of columns and key over gradients that do not depend on the weights, or a network's, without DeepSpeed."""
    steps, accumulate = draw(st.integers(1, 16)), draw(st.sampled_from([1, 2, 3]))
    model = draw(st.sampled_from(["LinearLossModule", "LinearLossModule", "TiedNet", "SmallNet"]))
    options: dict[str, Any] = {}
    if model == "LinearLossModule":
        some = st.dictionaries(st.tuples(st.integers(0, steps), st.just(0)), NOT_FINITE, max_size=2)
        options = {"not_finite": draw(some), "not_finite_in": draw(st.integers(0, 5))}
        options |= {"factors": draw(st.dictionaries(st.integers(0, steps), HOSTILE, max_size=1))}
        options |= {"frozen_in": draw(FROZEN), "micro": draw(st.integers(0, accumulate - 1))}
    elif model == "TiedNet":
        options = TIED_NETS[draw(st.sampled_from(sorted(TIED_NETS)))]
    keys = draw(
        st.fixed_dictionaries(
            EVERY_STEP if draw(st.booleans()) else KEYS,
            optional={
                "accumulate_on": st.sampled_from(["device", "host"]),
                "clip_prediction": st.booleans(),
                "overlap_step": st.booleans(),
            },
        )
    )
    case = Case(
        model=model,
        model_options=options,
        optimizer=OptimizerOptions(kind=draw(st.sampled_from(["AdamW", "AdamW", "Adam"])), lr=3e-3),
        steps=steps,
        accumulate=accumulate,
        precision=draw(st.sampled_from(["32-true", "32-true", "bf16-true"])),
        # With 50 most steps of a `LinearLossModule` are clipped, and some are not.
        max_norm=draw(st.sampled_from([None, None, 1e-12, 0.5, 1.0, 50.0])),
        flush_after=tuple(draw(st.sets(st.integers(1, steps), max_size=2))),
        warm_up=draw(st.sampled_from([0, 0, 2])),
        topk_ratio=draw(st.sampled_from([0, 0.05, 0.3, 1])),
        update_interval=draw(st.integers(1, 8)),
        publish_lag=draw(st.integers(0, 1)),
        loop="direct",
    )
    if draw(st.integers(0, 3)) == 0:
        case = replace(case, topk_ratio=0, update_interval=1, publish_lag=0, strategy_options={"in_place": True})
        return case.with_keys(**{key: keys[key] for key in keys if key in ("accumulate_on", "overlap_step")})
    if model == "LinearLossModule" and draw(st.integers(0, 3)) == 0:
        # Moments are rounded where windows end, which the oracle knows of these.
        fixed = {"select_interval": 0, "accumulate_on": "device", "clip_prediction": True}
        fixed["moments_dtype"] = draw(st.sampled_from(["bfloat16", "int8"]))
        return replace(case, model_options={"shapes": SHAPES[:6]}, warm_up=0).with_keys(**{**keys, **fixed})
    change = st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1))
    changes = draw(st.lists(change, max_size=3))
    if changes and keys.get("overlap_step", True):
        return replace(case, schedules=tuple(sorted(changes))).with_keys(**keys, **AUTO)
    return case.with_keys(**keys)


PORTIONS = pytest.mark.parametrize(
    "portion", [0, *(pytest.param(portion, marks=pytest.mark.slow) for portion in range(1, 11))]
)
"""Always the same trainings, so that a failure belongs to the change under test: a few, or many."""


def drawn(portion: int, *, few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of what is done for each training of a portion. Nothing is shrunk: a training takes a large part of a second."""
    options = settings(
        max_examples=many if portion else few,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda function: options(seed(portion)(function))


@PORTIONS
def test_every_schedule_leaves_adamws_state(portion: int) -> None:
    @drawn(portion, few=20, many=150)
    @given(case=schedules())
    def each(case: Case) -> None:
        assert_as_promised(case, run_here(case))

    each()


@pytest.mark.timeout(3000)
@PORTIONS
def test_the_state_is_adamws(portion: int) -> None:
    @drawn(portion, few=3, many=200)
    @given(case=trainings(), schedule=SCHEDULES, others=OTHERS)
    def each(case: Case, schedule: dict[str, Any], others: dict[str, Any]) -> None:
        gc.collect()
        before = shared_bytes()
        train_and_check(case.with_keys(**schedule, **others))
        gc.collect()
        assert shared_bytes() <= before

    each()
