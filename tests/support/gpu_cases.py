"""Cases of the tests on a GPU (`-m gpu`)."""

from dataclasses import replace
from typing import Any

import torch

from harness import EVERYTHING, Case

MILLISECOND = 1_800_000
"""Cycles of the device, roughly."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


MANY_AND_HUGE = [(64, 48)] * 20 + [(4096, 4096)] + [(53, 7)] * 6 + [(33,)] * 6
"""Small buckets are full again while the huge layer's gradient is still on its way to the host."""


def _many_and_huge(**options: Any) -> Case:
    case = Case(model="DeviceLinearLossModule", model_options={"shapes": MANY_AND_HUGE}, topk_ratio=0.3, **options)
    return case.with_keys(**EVERYTHING, reduce_bucket_size=20_000, overlap_comm=True)


def _network(**options: Any) -> Case:
    widths = [96] * 12 + [4096, 4096, 64]
    case = Case(model="Perceptron", model_options={"widths": widths}, topk_ratio=0.1, **options)
    return case.with_keys(**EVERYTHING, reduce_bucket_size=40_000, overlap_comm=True)


RACES = {
    name: replace(case, precision="bf16-true", steps=14, accelerator="gpu", recorded=False)
    for name, case in {
        "fixed gradients": _many_and_huge(max_norm=1.0),
        "accumulated": _many_and_huge(accumulate=2, update_interval=2, publish_lag=0),
        "accumulated on the host": _many_and_huge(accumulate=3, max_norm=1.0).with_keys(accumulate_on="host"),
        "submitted in backward": _network(update_interval=1, publish_lag=0),
        "a network": _network(max_norm=1.0),
    }.items()
}
