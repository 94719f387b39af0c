"""Two ranks (gloo): the partition cuts parameters in mid-row, column proxies and norms are added up over the ranks.

All cases run in one pair of processes, one after the other, since starting it takes seconds.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from test_training import LATE, compare_with_oracle, compare_with_oracle_step_by_step

from harness import EVERYTHING, Case, Run, run_here
from models import OptimizerOptions
from rank_processes import run_on_ranks
from reference import AdamWState
from same_bits import assert_close_to_adamw, assert_same_state, assert_same_tensors

FIXED = Case(steps=11)
CLIPPED = replace(FIXED, accumulate=3, max_norm=1.0)

EQUIVALENCE: dict[str, list[Case]] = {
    "fp32": [
        replace(FIXED, topk_ratio=topk_ratio, update_interval=update_interval, publish_lag=publish_lag)
        for topk_ratio, update_interval, publish_lag in [(0, 1, 0), (0.05, 4, 1), (0.5, 7, 3), (1, 2, 1)]
    ]
    + [replace(FIXED, topk_ratio=0.3, flush_after=(6,), strategy_options=EVERYTHING)],
    "fp32, accumulated, clipped": [
        replace(CLIPPED, topk_ratio=topk_ratio, update_interval=update_interval, publish_lag=publish_lag)
        for topk_ratio, update_interval, publish_lag in [(0, 2, 1), (0.05, 1, 0), (0.5, 4, 1)]
    ]
    + [replace(CLIPPED, topk_ratio=0.3, publish_lag=2, strategy_options=EVERYTHING)],
    "bf16, clipped, Adam": [
        replace(
            FIXED,
            precision="bf16-true",
            max_norm=1.0,
            optimizer=OptimizerOptions(kind="Adam"),
            topk_ratio=topk_ratio,
            update_interval=update_interval,
            publish_lag=publish_lag,
        )
        for topk_ratio, update_interval, publish_lag in [(0, 1, 0), (0.05, 4, 3), (1, 7, 0)]
    ],
    "not finite on one rank": [
        replace(
            CLIPPED,
            topk_ratio=topk_ratio,
            update_interval=4,
            publish_lag=1,
            model_options={"not_finite": {(0, 1): math.nan, (4, 0): math.inf, (5, 1): -math.inf, (10, 1): math.nan}},
        )
        for topk_ratio in (0, 0.05)
    ],
}
"""Cases with one sequence of gradients each."""

TRAINING = ["defaults", "nothing on the device", "long windows", "flushes", "accumulated, clipped"]
TRAINING_BF16 = ["defaults", "accumulated, clipped"]

SAME_DATA = replace(FIXED, model_options={"ranks_differ": False}, topk_ratio=0.3)
TINY = replace(FIXED, model_options={"shapes": ((2, 1), (1,))})
"""The second rank's partition holds nothing but padding."""


def cases() -> dict[str, Case]:
    """All cases by name."""
    named = {f"{sequence} {i}": case for sequence, cases in EQUIVALENCE.items() for i, case in enumerate(cases)}
    named |= {f"training {name}": LATE[name] for name in TRAINING}
    named |= {f"training bf16 {name}": replace(LATE[name], precision="bf16-true") for name in TRAINING_BF16}
    return {**named, "same data": SAME_DATA, "tiny": TINY}


@functools.cache
def all_runs() -> dict[str, list[Run]]:
    return run_on_ranks(cases())


@functools.cache
def exact(sequence: str) -> AdamWState:
    return EQUIVALENCE[sequence][0].adamw(world_size=2)


@pytest.mark.parametrize(
    "name", [f"{sequence} {i}" for sequence, cases in EQUIVALENCE.items() for i in range(len(cases))]
)
def test_state_is_adamws(name: str) -> None:
    sequence = name.rpartition(" ")[0]
    runs, theirs = all_runs()[name], exact(sequence)
    ours = runs[0]
    assert_close_to_adamw(ours, theirs)
    for run in runs:
        assert run.skipped == theirs.skipped
        assert run.counts == [theirs.count] * 2
        for w, master in zip(run.weights, ours.master, strict=True):
            assert torch.equal(w, master.to(w.dtype))
    # The same kernel over the same gradients: no bit depends on what was updated where and when.
    assert_same_state(ours, all_runs()[f"{sequence} 0"][0])


@pytest.mark.parametrize("name", TRAINING)
def test_every_step_is_the_oracles(name: str) -> None:
    compare_with_oracle(LATE[name], all_runs()[f"training {name}"])


@pytest.mark.parametrize("name", TRAINING_BF16)
def test_every_step_is_the_oracles_in_bf16(name: str) -> None:
    compare_with_oracle_step_by_step(replace(LATE[name], precision="bf16-true"), all_runs()[f"training bf16 {name}"])


def test_two_ranks_with_one_ranks_data_give_the_same_bits() -> None:
    """Without clipping nothing that is rounded depends on the number of ranks: half a gradient plus half a gradient is exact."""
    assert_same_state(all_runs()["same data"][0], run_here(SAME_DATA))


def test_a_rank_with_nothing_but_padding() -> None:
    runs = all_runs()["tiny"]
    theirs = TINY.adamw(world_size=2)
    for run in runs:
        assert run.counts == [TINY.steps] * 2
        for ours, w in zip(run.weights, theirs.weights, strict=True):
            torch.testing.assert_close(ours.double(), w, rtol=1e-6, atol=1e-6)


def test_ranks_show_the_same_weights() -> None:
    for name in cases():
        first, second = all_runs()[name]
        for of_first, of_second in zip([*first.shown, first.weights], [*second.shown, second.weights], strict=True):
            assert_same_tensors(of_first, of_second, name)
