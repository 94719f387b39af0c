"""Clipping, and gradients that are not finite, zero, denormal or near the end of their type's range: what is applied, skipped and shown."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import APPROXIMATE, Case, run_here
from same_bits import assert_is_adamw

HOSTILE_STEP = 3
"""Counted from 0: in mid-window, after the selection."""

APPLIED = (0.0, 1e-40, 1e17)
SKIPPED = (math.nan, -math.inf, 3e18, 1e38)
"""Factors on the loss of one step, and with it on its gradients, whose norm is 30 before: above 1.8e19 its square is not in float32."""

BASE = Case(model="LinearLossModule", steps=9, topk_ratio=0.3, strategy_options=APPROXIMATE, loop="direct")


def hostile(factor: float, *steps: int, **options: Any) -> Case:
    factors = {"factors": dict.fromkeys(steps or (HOSTILE_STEP,), factor)}
    return replace(BASE, **{**options, "model_options": {**factors, **options.get("model_options", {})}})


SIZES = [((0,), (0, 5), (3, 0), (1, 1), (1,), (2, 3)), ((2, 1), (1, 2), (2,)), ((101, 3), (7, 103), (13,), (97,))]
"""No elements, one element, one row, one column, primes; fewer elements than blocks."""
VECTOR = replace(
    BASE,
    model="LinearLossModule",
    model_options={"frozen_in": {3: (2, 6)}, "not_finite": {(1, 0): math.inf}, "not_finite_in": 3},
    max_norm=1.0,
)
CASES = {
    **{f"{factor}": hostile(factor) for factor in (*APPLIED, *SKIPPED)},
    "1e+17, bf16": hostile(1e17, precision="bf16-true", max_norm=1.0),
    "nan, everything": hostile(math.nan, accumulate=2, max_norm=1.0, publish_lag=3).with_keys(select_interval=1),
    "never finite": hostile(math.nan, *range(9)),
    "one element of 3e38": replace(
        BASE, precision="bf16-true", max_norm=1.0, model_options={"not_finite": {(HOSTILE_STEP, 0): 3e38}}
    ),
    **{
        f"S={s}, d={d}, {len(shapes)} shapes": hostile(
            math.nan, model_options={"shapes": shapes}, update_interval=s, publish_lag=d, steps=7
        )
        for shapes, (s, d) in zip(SIZES, ((1, 0), (16, 2), (4, 1)), strict=True)
    },
    # Nothing is left of it in the next steps, in which the vector is frozen.
    **{f"a vector, S={s}, d={d}": replace(VECTOR, update_interval=s, publish_lag=d) for s, d in ((4, 1), (1, 0))},
}
"""What lies between these, tests/fuzz draws."""


@pytest.mark.parametrize("name", CASES)
def test_the_flush_leaves_adamw(name: str) -> None:
    """With weight prediction and provisional updates: what the model shows stays finite, and what the flush leaves is AdamW."""
    run = run_here(CASES[name])
    assert_is_adamw(CASES[name], run)
    if name.split(",")[0] in map(str, (*APPLIED, *SKIPPED)):
        assert run.skipped == (float(name.split(",")[0]) not in APPLIED)


@pytest.mark.parametrize("factor", [1e17, math.nan])
def test_deepspeeds_offload_does_the_same(factor: float) -> None:
    """All parameters have gradients in all steps: where there is none, DeepSpeed's offload applies the one before again."""
    shapes = ((31, 29), (53, 7), (37,), (3, 211), (1,))
    case = hostile(factor, max_norm=1.0, model_options={"shapes": shapes}, update_interval=1, publish_lag=0)
    ours, theirs = run_here(case), run_here(replace(case, loop="trainer", stock=True))
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
