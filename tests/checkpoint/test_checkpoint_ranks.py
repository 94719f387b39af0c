"""A checkpoint of one number of ranks continues under another: AdamW's state exactly, everything else anew.

Each number of ranks is one set of processes, since starting them takes seconds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from checkpoint_files import in_order
from harness import EVERYTHING, Case, Run, run_here
from rank_processes import run_on_ranks
from same_bits import assert_same_state, assert_same_tensors

STEPS = 12
LIMIT = Case(topk_ratio=0.0, update_interval=1, publish_lag=0, steps=STEPS, model="SmallNet")
"""The settings at which training is AdamW's, so that only the order of sums depends on the number of ranks."""
CASES = {
    "limit": LIMIT,
    "everything": Case(topk_ratio=0.3, max_norm=1.0, steps=STEPS, strategy_options=EVERYTHING),
    "bf16": Case(topk_ratio=0.3, precision="bf16-true", steps=STEPS, strategy_options=EVERYTHING),
}


def run_all(cases: dict[str, Case], ranks: int) -> dict[str, Run]:
    if ranks == 1:
        return {name: run_here(case) for name, case in cases.items()}
    runs = run_on_ranks(cases, ranks=ranks)
    return {name: of_ranks[0] for name, of_ranks in runs.items()}


@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        (["bf16"], 1, 2),
        (["everything"], 2, 1),
        *(pytest.param(list(CASES), *ranks, marks=pytest.mark.slow) for ranks in [(1, 2), (2, 1), (2, 4), (4, 2)]),
    ],
)
def test_other_ranks(names: Sequence[str], before: int, after: int, tmp_path: Path) -> None:
    """Saves after 5 steps; loads that without a step, and goes on with both numbers of ranks."""
    saving: dict[str, Case] = {}
    loading: dict[str, Case] = {}
    for name in names:
        # The same data on every rank: then the gradient's mean does not depend on how many there are.
        case = replace(CASES[name], model_options={"ranks_differ": False})
        path = str(tmp_path / f"{name}.ckpt")
        saving[f"{name}, saved"] = replace(case, steps=5, save_at=5, checkpoint=path)
        saving[f"{name}, the same ranks"] = replace(case, checkpoint=path)
        loading[f"{name}, loaded"] = replace(case, steps=5, checkpoint=path)
        loading[f"{name}, other ranks"] = replace(case, checkpoint=path)
    runs = run_all(saving, before) | run_all(loading, after)
    for name in names:
        loaded, saved = runs[f"{name}, loaded"], runs[f"{name}, saved"]
        assert_same_state(loaded, saved)
        assert_same_tensors(loaded.weights, saved.weights)
        other, same = runs[f"{name}, other ranks"], runs[f"{name}, the same ranks"]
        assert len(other.losses) == len(same.losses) == STEPS - 5
        for a, b in zip(other.master, same.master, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_plain_deepspeed_on_two_ranks_in_both_of_its_orders(order: bool, tmp_path: Path) -> None:
    """A folder has the order in which plain DeepSpeed, with the same configuration, has the parameters; any order is read."""
    case = replace(LIMIT, model_options={"ranks_differ": False})
    config = {"zero_optimization": {"round_robin_gradients": order}}
    ours, stock = case.with_keys(config=config), replace(case, stock=True).with_keys(config=config)
    by_ours, by_stock = str(tmp_path / "ours.ckpt"), str(tmp_path / "stock.ckpt")
    cases = {
        "whole": replace(ours, save_at=5, checkpoint=by_ours),
        "stock from ours": replace(stock, checkpoint=by_ours),
        "stock": replace(stock, save_at=5, checkpoint=by_stock),
        # Whatever the configuration says.
        "ours from stock": replace(case, checkpoint=by_stock),
        "loaded ours": replace(case, steps=5, checkpoint=by_ours),
        "loaded stock": replace(case, steps=5, checkpoint=by_stock),
    }
    runs = run_on_ranks(cases)
    for name in ("ours", "stock"):
        saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"{name}.ckpt"))
        assert_same_tensors(runs[f"loaded {name}"][0].master, in_order(case, saved))
    for name in ("stock from ours", "stock", "ours from stock"):
        torch.testing.assert_close(runs[name][0].weights, runs["whole"][0].weights, rtol=0, atol=2e-6)
