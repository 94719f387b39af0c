"""Configurations of DeepSpeed's own ZenFlow tests, as dicts: each trains with AdamW's numbers, or is refused by the key's name."""

from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from harness import Case, fit, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import KEYS
from models import LinearLossModule
from rank_processes import run_on_ranks
from same_bits import assert_close_to_adamw

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

INTERVALS = {"auto": ("auto", "auto", "auto", 0), "steps": ("step", 10, 3, 3), "epochs": ("epoch", 1, 4, 0)}
"""`select_strategy`, `select_interval`, `update_interval` and `full_warm_up_rounds`."""


def configuration(intervals: str = "steps") -> dict[str, Any]:
    """As DeepSpeed's tests/unit/runtime/zenflow/test_zf.py has it."""
    strategy, select_interval, update_interval, warm_up = INTERVALS[intervals]
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "zenflow": {
                "topk_ratio": 0.01,
                "select_strategy": strategy,
                "select_interval": select_interval,
                "update_interval": update_interval,
                "overlap_step": False,
                "offload": False,
                "auto_ratio": 0.99,
                "full_warm_up_rounds": warm_up,
            },
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }


def case_of(intervals: str) -> Case:
    """Five batches, as DeepSpeed's tests; the oracle knows the model's optimizer only. DeepSpeed selected none of 50 columns at 0.01 once."""
    given = {key: value for key, value in configuration(intervals).items() if key != "optimizer"}
    unset = dict.fromkeys(KEYS.keys() & Case().keys().keys() - {"worker_cores", "worker_timeout"})
    return Case(
        model_options={"shapes": ((50, 50), (50,)) * 2},
        steps=5,
        precision="bf16-true",
        strategy_options={**unset, "config": given},
    )


@pytest.mark.parametrize("intervals", INTERVALS)
def test_zenflow_single(intervals: str) -> None:
    case = case_of(intervals)
    assert_close_to_adamw(run_here(case), case.adamw())


@pytest.mark.slow  # starts processes
def test_zenflow_distributed() -> None:
    cases = {name: case_of(name) for name in INTERVALS}
    for name, runs in run_on_ranks(cases).items():
        for run in runs:
            assert_close_to_adamw(run, cases[name].adamw(world_size=2))


def test_the_optimizer_of_a_configuration_with_auto_wherever_it_has_a_meaning() -> None:
    places = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
    strategy = ZenFlowStrategy(config={**configuration("auto"), **dict.fromkeys(places, "auto")})
    trainer = fit(LinearLossModule(), strategy, precision="bf16-true", gradient_clip_val=1.0)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1e-4]


def test_gradients_of_another_type() -> None:
    config = {**configuration(), "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(MisconfigurationException, match="does not support data_types.grad_accum_dtype other than"):
        fit(LinearLossModule(), ZenFlowStrategy(config=config), steps=1, precision="bf16-true")


@pytest.mark.parametrize(
    "path",
    ["zero_optimization.stage", "zero_optimization.overlap_comm", "zero_optimization.zenflow.topk_ratio", "optimizer.type",
     "optimizer.params.lr", "zero_optimization.offload_optimizer.device", "bf16.enabled", "steps_per_print"],
)  # fmt: skip
def test_auto_without_a_meaning(path: str) -> None:
    section = config = configuration()
    *folders, key = path.split(".")
    for folder in folders:
        section = section[folder]
    section[key] = "auto"
    with pytest.raises((MisconfigurationException, ValueError), match=f"{key} must be .* got 'auto'"):
        ZenFlowStrategy(config=config)
