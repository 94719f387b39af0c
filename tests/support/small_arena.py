"""A small arena of two parameter groups."""

from collections.abc import Sequence

import torch

from lightning_zenflow.core.partition import Partition, Slice, build_partition, group_begins
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.worker.arena import Arena, ArenaSizes

GROUPS = [
    GroupHyperparameters(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True),
    GroupHyperparameters(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.2, decoupled=False),
]
SIZES = ArenaSizes(n_step_records=16, n_slots=16, n_publish_buffers=4, dtype=torch.float32)


def make_partition(n_blocks: int = 3, counts: Sequence[int] = (1003, 517)) -> Partition:
    """Of two slices in parameter groups of their own, with these numbers of elements; padding follows each."""
    sizes = [n + 1 for n in counts]
    slices = [
        Slice.of((n,), parameter=i, param_group=i, begin=begin, start=0, numel=n)
        for i, (n, begin) in enumerate(zip(counts, group_begins(sizes), strict=True))
    ]
    return build_partition(slices, sizes, n_blocks)


def resolved(arena: Arena) -> tuple[int, int]:
    """The last step whose factor the worker has read, and the number of applied steps up to it."""
    step = int(arena._header.resolved_step)
    return step, int(arena._counts[step % len(arena.step_words)])
