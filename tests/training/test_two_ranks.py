"""Two ranks (gloo): the partition cuts parameters in mid-row, column proxies and norms are added up over the ranks.

All cases run in one pair of processes, one after the other, since starting it takes seconds.
"""

import functools
import math
from dataclasses import replace

import pytest
from test_bf16_moments import CASES as BF16_MOMENTS
from test_optimizer_in_backward import CASES as IN_BACKWARD
from test_provisional_update import CASES as PROVISIONAL
from test_provisional_update import PLAIN, UPDATED, check_updated_entries
from test_training import ALL as LATE
from test_training import compare_with_oracle

from harness import APPROXIMATE, EVERYTHING, Case, Run, run_here
from models import OptimizerOptions
from rank_processes import run_on_ranks
from same_bits import assert_is_adamw, assert_same_run, assert_same_state, assert_same_tensors

FIXED = Case(steps=11)
CLIPPED = replace(FIXED, accumulate=3, max_norm=1.0)
ADAM = replace(FIXED, precision="bf16-true", max_norm=1.0, optimizer=OptimizerOptions(kind="Adam"))
NOT_FINITE = {"not_finite": {(0, 1): math.nan, (4, 0): math.inf, (5, 1): -math.inf, (10, 1): math.nan}}

GRID = [
    (FIXED, 0, 1, 0),
    (FIXED, 0.5, 7, 3),
    (CLIPPED, 0, 2, 1),
    (CLIPPED, 0.05, 1, 0),
    (ADAM, 0.05, 4, 3),
    (ADAM, 1, 7, 0),
]
ADAMW = {
    **{
        f"{number}: top {k}, S={s}, d={d}": replace(case, topk_ratio=k, update_interval=s, publish_lag=d)
        for number, (case, k, s, d) in enumerate(GRID)
    },
    "everything": replace(CLIPPED, topk_ratio=0.3, publish_lag=2, flush_after=(6,), strategy_options=EVERYTHING),
    **{f"not finite on one rank, top {k}": replace(CLIPPED, topk_ratio=k, model_options=NOT_FINITE) for k in (0, 0.05)},
    # The second rank's partition holds nothing but padding.
    "tiny": replace(FIXED, model_options={"shapes": ((2, 1), (1,))}),
    **{
        name: PROVISIONAL[name]
        for name in (
            "tied weights, bf16",
            "a layer used now and then, bf16",
            "frozen layers, checkpointing",
            "reentrant checkpointing",
            "freezing: layers in turn",
            "freezing: long lag",
            "freezing: changes of schedule",
            "freezing: nearly everything",
        )
    },
    **{f"in backward: {name}": IN_BACKWARD[name] for name in ("TiedNet", "no gradient", "accumulated", "not finite")},
    "bf16 moments": replace(BF16_MOMENTS["S=2, d=0, columns on the device"], max_norm=0.5),
    "accumulated on the host": replace(CLIPPED, model="SmallNet", strategy_options=APPROXIMATE).with_keys(
        accumulate_on="host"
    ),
}
SAME_DATA = replace(FIXED, model_options={"ranks_differ": False}, topk_ratio=0.3)
TRAINING = ["defaults", "long windows", "flushes", "accumulated, clipped", "in backward", "defaults, bf16-true"]


@functools.cache
def all_runs() -> dict[str, list[Run]]:
    others = {
        "same data": SAME_DATA,
        "updated": UPDATED,
        "plain": PLAIN,
        "on the device": ADAMW["accumulated on the host"],
    }
    others["on the device"] = others["on the device"].with_keys(accumulate_on="device")
    cases = {**ADAMW, **{name: LATE[name] for name in TRAINING}, **others}
    return run_on_ranks({name: replace(case, loop="trainer") for name, case in cases.items()})


@pytest.mark.parametrize("name", ADAMW)
def test_the_state_is_adamws(name: str) -> None:
    assert_is_adamw(ADAMW[name], *all_runs()[name])


@pytest.mark.parametrize("name", TRAINING)
def test_every_step_is_the_oracles(name: str) -> None:
    compare_with_oracle(LATE[name], all_runs()[name])


def test_two_ranks_with_one_ranks_data_give_the_same_bits() -> None:
    """Without clipping nothing that is rounded depends on the number of ranks: half a gradient plus half a gradient is exact."""
    assert_same_state(all_runs()["same data"][0], run_here(replace(SAME_DATA, loop="direct")))


def test_provisional_updates_are_of_host_owned_matrices_only() -> None:
    for updated, plain in zip(all_runs()["updated"], all_runs()["plain"], strict=True):
        check_updated_entries(updated, plain, world_size=2)


def test_accumulation_on_the_host_gives_the_bits_of_the_device() -> None:
    for ours, theirs in zip(all_runs()["accumulated on the host"], all_runs()["on the device"], strict=True):
        assert_same_run(ours, theirs)


def test_ranks_show_the_same_weights() -> None:
    for name, (first, second) in all_runs().items():
        for ours, theirs in zip([*first.shown, first.weights], [*second.shown, second.weights], strict=True):
            assert_same_tensors(ours, theirs, name)
