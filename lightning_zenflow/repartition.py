"""An optimizer state of one number of ranks, cut anew for another. Pure functions on DeepSpeed's dicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, GROUP_PADDINGS, SINGLE_PARTITION_OF_FP32_GROUPS

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, in the state of each flat partition."""


def repartition(saved: Sequence[Mapping[str, Any]], partition_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """One rank's part of an optimizer state that was saved by another number of ranks.

    A parameter group is one flat tensor over all ranks, cut into equal parts, with padding at its end only. So the parts without padding,
    one after the other, are the same for every number of ranks.

    Args:
        saved: the states of all ranks that saved, in their order.
        partition_sizes: elements of each parameter group's part on the rank, padding included.
        rank: whose state is wanted.

    Returns:
        As an element of `saved`; tensors are copies. What is not AdamW's is the first rank's.
    """
    base = saved[0][BASE_OPTIMIZER_STATE]
    keys = [param_group["params"][0] for param_group in base["param_groups"]]
    masters, states = [], {}
    for group, (key, size) in enumerate(zip(keys, partition_sizes, strict=True)):
        first = base["state"][key]
        # Neither master weights nor moments of padding are ever read.
        master, *moments = (torch.zeros(size) for _ in range(1 + len(MOMENTS)))
        begin = rank * size
        offset = 0
        for state in saved:
            part = state[SINGLE_PARTITION_OF_FP32_GROUPS][group]
            lower, upper = max(begin, offset), min(begin + size, offset + part.numel())
            if lower < upper:
                theirs = state[BASE_OPTIMIZER_STATE]["state"][key]
                sources = [part, *(theirs[name] for name in MOMENTS)]
                for target, source in zip((master, *moments), sources, strict=True):
                    target[lower - begin : upper - begin] = source[lower - offset : upper - offset]
            offset += part.numel()
        masters.append(master)
        states[key] = {**first, **dict(zip(MOMENTS, moments, strict=True))}
    return {
        **saved[0],
        SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        GROUP_PADDINGS: [0] * len(masters),
        BASE_OPTIMIZER_STATE: {**base, "state": states},
    }
