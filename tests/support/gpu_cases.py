"""Cases of the tests on a GPU (`-m gpu`)."""

from dataclasses import replace

import lightning.pytorch as pl
import torch

import random_selection  # noqa: F401  # named by cases
from harness import EVERYTHING, Case
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer

MILLISECOND = 1_800_000
"""Cycles of the device, roughly."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def optimizer_of(trainer: pl.Trainer) -> ZenFlowZeroOptimizer:
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    optimizer = trainer.strategy.zenflow_optimizer
    assert optimizer is not None
    return optimizer


MANY_AND_HUGE = [(64, 48)] * 20 + [(4096, 4096)] + [(53, 7)] * 6 + [(33,)] * 6
"""Small buckets are full again while the huge layer's gradient is still on its way to the host."""

RACES = {
    "fixed gradients": Case(
        model="DeviceLinearLossModule",
        model_options={"shapes": MANY_AND_HUGE},
        topk_ratio=0.3,
        max_norm=1.0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 20_000, "overlap_comm": True},
    ),
    "accumulated": Case(
        model="DeviceLinearLossModule",
        model_options={"shapes": MANY_AND_HUGE},
        topk_ratio=0.3,
        accumulate=2,
        update_interval=2,
        publish_lag=0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 20_000, "overlap_comm": True, "offload": True},
    ),
    "accumulated on the host": Case(
        model="DeviceLinearLossModule",
        model_options={"shapes": MANY_AND_HUGE},
        topk_ratio=0.3,
        accumulate=3,
        max_norm=1.0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 20_000, "overlap_comm": True, "accumulate_on": "host"},
    ),
    "submitted in backward": Case(
        model="Perceptron",
        model_options={"widths": [96] * 12 + [4096, 4096, 64]},
        topk_ratio=0.1,
        update_interval=1,
        publish_lag=0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 40_000, "overlap_comm": True},
    ),
    "a network": Case(
        model="Perceptron",
        model_options={"widths": [96] * 12 + [4096, 4096, 64]},
        topk_ratio=0.1,
        max_norm=1.0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 40_000, "overlap_comm": True},
    ),
}
for name, case in RACES.items():
    RACES[name] = replace(case, precision="bf16-true", steps=14, accelerator="gpu", recorded=False)
