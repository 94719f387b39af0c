"""What all ranks have saved, copied to another layout, and the terms in which DeepSpeed's stages save it. Pure.

States are in the terms of stage 2, whatever the stage of the folder; `in_terms_of_stage_3` is the way back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    DS_VERSION,
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from torch import Tensor

from lightning_zenflow.engine.flat_layout import Layout, Run, runs
from lightning_zenflow.engine.host_state import MOMENTS

_TERMS = {FP32_FLAT_GROUPS: SINGLE_PARTITION_OF_FP32_GROUPS, OPTIMIZER_STATE_DICT: BASE_OPTIMIZER_STATE}
"""Keys of stage 3 with those of stage 2: the flat master weights, and the state of the user's optimizer."""


def in_terms_of_stage_2(content: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state in a file of stage 3; under stage 2 the file's version of DeepSpeed is in it."""
    state = content[OPTIMIZER_STATE_DICT]
    return {DS_VERSION: content[DS_VERSION], **{_TERMS.get(key, key): value for key, value in state.items()}}


def in_terms_of_stage_3(state: Mapping[str, Any], n_ranks: int) -> dict[str, Any]:
    """The optimizer's state as stage 3 loads it."""
    names = {ours: theirs for theirs, ours in _TERMS.items()}
    return {**{names.get(key, key): value for key, value in state.items()}, ZERO_STAGE: 3, PARTITION_COUNT: n_ranks}


def keys_of(base: Mapping[str, Any]) -> list[Any]:
    """Keys of the flat buffers in the state of the user's optimizer, in the buffers' order; a group has several under stage 3."""
    return [key for param_group in base["param_groups"] for key in param_group["params"]]


def copy_parts(
    read: Callable[[int], Sequence[Sequence[Tensor]]],
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    rank: int,
    to: Sequence[Sequence[Tensor]],
) -> None:
    """Copies a rank's part of what other ranks have, one of them at a time.

    Args:
        read: what a rank has: for each of `sources` its flat tensors, of any type.
        sources: layouts there.
        targets: layouts to copy to.
        rank: rank in `targets`.
        to: for each of `targets` as many tensors, [partition_numel]; padding is not written.
    """
    copies = [
        (run, s, t)
        for t, target in enumerate(targets)
        for s, source in enumerate(sources)
        for run in runs(source, target)
        if run.target_rank == rank
    ]
    copies.sort(key=lambda copy: copy[0].source_rank)
    for source_rank, of_rank in groupby(copies, key=lambda copy: copy[0].source_rank):
        # By a function of its own, so that nothing refers to the file when the next one is read.
        _copy_runs(read(source_rank), to, of_rank)


@torch.no_grad()  # master weights are saved with `requires_grad`
def _copy_runs(
    saved: Sequence[Sequence[Tensor]], to: Sequence[Sequence[Tensor]], copies: Iterable[tuple[Run, int, int]]
) -> None:
    """Copies runs from one rank's tensors, given with the numbers of the source's layout and the target's."""
    for run, s, t in copies:
        for ours, theirs in zip(to[t], saved[s], strict=True):
            part = theirs.narrow(0, run.source_begin, run.numel)
            ours.narrow(0, run.target_begin, run.numel).copy_(part)


def repartition(
    own: Mapping[str, Any],
    read: Callable[[int], Mapping[str, Any]],
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    rank: int,
) -> dict[str, Any]:
    """Redistributes AdamW's state that was saved in another layout.

    Args:
        own: state of a rank that saved, for what all of them have in common.
        read: state of a rank that saved.
        sources: layouts of each flat buffer there.
        targets: layouts to redistribute to; the parameters of one are of one parameter group.
        rank: rank of the new partition.

    Returns:
        AdamW's state in DeepSpeed's terms, copied, float32; 0 in padding.
    """
    states = [
        [torch.zeros(target.partition_numel, dtype=torch.float32, device="cpu") for _ in range(1 + len(MOMENTS))]
        for target in targets
    ]

    def parts(source_rank: int) -> list[list[Tensor]]:
        state = read(source_rank)
        base, masters = state[BASE_OPTIMIZER_STATE], state[SINGLE_PARTITION_OF_FP32_GROUPS]
        return [
            [master, *(base["state"][key][name] for name in MOMENTS)]
            for master, key in zip(masters, keys_of(base), strict=True)
        ]

    copy_parts(parts, sources, targets, rank, states)
    base = own[BASE_OPTIMIZER_STATE]
    param_groups, of_key, buffers = [], {}, iter(sources)
    for param_group in base["param_groups"]:
        names = {name for _ in param_group["params"] for name in next(buffers).places}
        keys = [key for key, target in enumerate(targets) if not names.isdisjoint(target.places)]
        for key in keys:
            in_common = base["state"][param_group["params"][0]]
            of_key[key] = {**in_common, **dict(zip(MOMENTS, states[key][1:], strict=True))}
        param_groups.append({**param_group, "params": keys})
    return {
        SINGLE_PARTITION_OF_FP32_GROUPS: [master for master, *_ in states],
        GROUP_PADDINGS: [0] * len(targets),
        PARAM_ALIGNMENT_PADDINGS: [[0] * len(target.places) for target in targets],
        BASE_OPTIMIZER_STATE: {**base, "param_groups": param_groups, "state": of_key},
    }
