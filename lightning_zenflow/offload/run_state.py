"""Components of an optimizer step, and the state of a run besides AdamW's, with which a resumed run continues bit for bit.

Layout 5, of plain numbers, lists and CPU tensors::

    version: 5
    layout
        config          keys that change numbers, with their values
        world_size
        slices          [(begin, start, numel, columns)] of `Partition.slices`
        block_length    of the `Partition`, where its blocks have one length
    step, skipped       steps done, and how many of them were not finite
    trained             [parameter] whether it was trained, not frozen, in the last step
    ownership
        selections      {number: [slice] columns, None for all}
        of_block        [block] number of the selection that it has, None before the first one
        wanted          [block] number of the selection that it has, or changes to with its next window
    planner
        synchronous_until, changing_until
        selector        owned (positions of selected columns, None before the first selection), next, epoch
        schedule        None for fixed S and d; else update_interval, publish_lag
    provisional         None if weights have no provisional updates; else
        second_moments  [slice] tensors of the factored second moment, None for slices without, or that were never late
        clip            clip coefficient of the last applied step, NaN before the first
        noise           state of the noise generator
    in_backward         None, or what the next step's gradient norm is predicted from: ratio, last
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.offload.fill import Fill
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.ownership import Ownership
from lightning_zenflow.offload.plan import Planner
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.readings import CounterReader
from lightning_zenflow.offload.selector import Selector

CHECKPOINT_KEY = "zenflow"
"""In DeepSpeed's optimizer state of a rank; DeepSpeed itself reads the keys it knows only."""

VERSION = 5
"""Number of the layout; a checkpoint of another one is refused."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of the step of one rank, built together; each is documented where it is defined."""

    rank: RankState
    jobs: JobQueue
    ownership: Ownership
    provisional: ProvisionalUpdate
    fill: Fill
    selector: Selector
    planner: Planner
    counters: CounterReader
    write_count: Callable[[int], None]
    """Writes the number of applied steps to the user's optimizer, as checkpoints hold it."""
    skipped: Tensor
    """0-D int64 on the device: steps that changed nothing because their gradient norm was not finite."""


def layout_of(config: ZenFlowConfig, world_size: int, partition: Partition) -> dict[str, Any]:
    """What must be the same for a run to continue another one bit for bit."""
    return {
        "config": config.numeric_values(),
        "world_size": world_size,
        "slices": [(s.begin, s.start, s.numel, s.columns) for s in partition.slices],
        **({} if partition.block_length is None else {"block_length": partition.block_length}),
    }


def difference_of(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Reason why a run cannot continue another one bit for bit, by their `layout_of`; empty if it can."""
    if saved["world_size"] != present["world_size"]:
        return f"it was saved by {saved['world_size']} ranks, these are {present['world_size']}"
    theirs, ours = saved["config"], present["config"]
    for key in {**ours, **theirs}:
        if key not in ours:
            return f"it was saved with {key}={theirs[key]!r}, a key that no longer exists"
        if theirs.get(key) != ours[key]:
            return f"it was saved with {key}={theirs.get(key)!r}, now it is {ours[key]!r}"
    return "" if saved == present else "its partition is another"
