"""Configurations of DeepSpeed's own ZenFlow tests, as dicts: each trains with AdamW's numbers, or is refused by the key's name."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from harness import Case, fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import KEYS
from models import LinearLossModule
from rank_processes import run_on_ranks
from same_bits import assert_close_to_adamw

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

STEPS = 5
"""Batches of DeepSpeed's tests: 20 samples in batches of four."""

INTERVALS = {"auto": ("auto", "auto", "auto"), "steps": ("step", 10, 3), "epochs": ("epoch", 1, 4)}


def configuration(
    intervals: tuple[str, int | str, int | str] = ("step", 1, 1),
    *,
    warm_up: int = 0,
    topk_ratio: float = 0.2,
) -> dict[str, Any]:
    """As DeepSpeed's tests/unit/runtime/zenflow/test_zf.py has it."""
    strategy, select_interval, update_interval = intervals
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
                "topk_ratio": topk_ratio,
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


class Layers(LinearLossModule):
    """Two layers of the size of DeepSpeed's test model; the optimizer is the configuration's."""

    def __init__(self, *, width: int = 10) -> None:
        super().__init__(shapes=((width, width), (width,)) * 2, length=STEPS, ranks_differ=False)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0)


def assert_trains(config: dict[str, Any], **options: Any) -> None:
    """Weights are AdamW's, whose first steps are about the learning rate long, within the rounding of bf16."""
    ours = Layers(**options)
    trainer = fit(ours, ZenFlowStrategy(config=config), steps=STEPS, precision="bf16-true")
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.zenflow_optimizer is not None
    # The oracle in float32 with the gradients that bf16 gives.
    twin = Layers(**options)
    exact = [torch.nn.Parameter(p.detach().bfloat16().float()) for p in twin.parameters()]
    optimizer = torch.optim.AdamW(exact, lr=1e-4, weight_decay=0)
    for step in range(STEPS):
        for i, p in enumerate(exact):
            gradient = twin.gradient(i, step, 0, 0)
            p.grad = None if gradient is None else gradient.bfloat16().float()
        optimizer.step()
    master = torch.cat(
        [p.detach().flatten() for p in trainer.strategy.zenflow_optimizer.single_partition_of_fp32_groups]
    )
    expected = torch.cat([p.detach().flatten() for p in exact])
    torch.testing.assert_close(master[: expected.numel()], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("intervals", "warm_up"), [("auto", 0), ("steps", 3), ("epochs", 0)])
def test_zenflow_single(intervals: str, warm_up: int) -> None:
    """DeepSpeed selected none of 50 columns at 0.01 once."""
    assert_trains(configuration(INTERVALS[intervals], warm_up=warm_up, topk_ratio=0.01), width=50)


def test_gradients_of_another_type() -> None:
    config = {**configuration(), "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(MisconfigurationException, match="does not support data_types.grad_accum_dtype other than"):
        fit(Layers(), ZenFlowStrategy(config=config), steps=1, precision="bf16-true")


def on_two_ranks(config: dict[str, Any], width: int = 10) -> Case:
    """The oracle of cases knows the model's optimizer only."""
    given = {key: value for key, value in config.items() if key != "optimizer"}
    unset = dict.fromkeys(KEYS.keys() & Case().keys().keys() - {"worker_cores", "worker_timeout"})
    return Case(
        model_options={"shapes": ((width, width), (width,)) * 2},
        steps=STEPS,
        precision="bf16-true",
        strategy_options={**unset, "config": given},
    )


@pytest.mark.slow  # starts processes
def test_zenflow_distributed() -> None:
    cases = {name: on_two_ranks(configuration(intervals, warm_up=3)) for name, intervals in INTERVALS.items()}
    cases["a small ratio"] = on_two_ranks(configuration(topk_ratio=0.01), 50)
    for name, runs in run_on_ranks(cases).items():
        for run in runs:
            assert_close_to_adamw(run, cases[name].adamw(world_size=2))


WITH_AUTO = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")


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


def test_auto_in_all_places_that_have_one() -> None:
    config = {**configuration(INTERVALS["auto"]), **dict.fromkeys(WITH_AUTO, "auto")}
    fit(Layers(), ZenFlowStrategy(config=config), steps=STEPS, precision="bf16-true", gradient_clip_val=1.0)
