"""The optimizer and learning rates of the examples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from transformers import get_linear_schedule_with_warmup


def adamw_with_warmup(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    warmup_ratio: float,
    steps: int,
) -> OptimizerLRScheduler:
    """AdamW in two groups, matrices with weight decay and vectors without, and a linear warm-up and decay per step.

    The learning rate rises from 0 in the share `warmup_ratio` of all `steps`; then it falls to 0.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.requires_grad:
            # Where ZeRO stage 3 has divided a parameter, its own shape is empty.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            groups[is_matrix].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=betas,
        eps=eps,
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, int(steps * warmup_ratio), steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def check_warmup_ratio(warmup_ratio: float) -> None:
    """ValueError where `warmup_ratio` is no share."""
    if not 0 <= warmup_ratio <= 1:
        raise ValueError(f"model.warmup_ratio={warmup_ratio} is not allowed; it must lie between 0 and 1")
