"""Components of an optimizer step, and the state of a run besides AdamW's, with which a resumed run continues bit for bit.

Layout 5, of plain numbers, lists and CPU tensors::

    version: 5
    layout
        config          keys that change numbers, with their values
        world_size
        slices          [(begin, start, numel, columns)] of `Partition.slices`
    step, skipped       steps done, and how many of them were not finite
    trained             [parameter] whether it was trained, not frozen, in the last step
    ownership
        selections      [selection][parameter] columns, None for all
        of_block        [block] index into `selections`, None before the first selection
        selected        index of the newest selection
        waiting         blocks that have not changed to it
        owned_entirely  blocks of which the device owns all entries, or will with their next window
        entire          index of their selection
    planner
        synchronous_until, changing_until
        selector        owned (positions of selected columns, None before the first selection), next, epoch
        schedule        None for fixed S and d; else update_interval, publish_lag, tail (share of all ranks' blocks),
                        tail_blocks (the rank's own)
    provisional         None if weights have no provisional updates; else
        second_moments  [slice] tensors of the factored second moment, None for slices without, or that were never late
        clip            clip coefficient of the last applied step, NaN before the first
        noise           state of the noise generator
    in_backward         None, or what the next step's gradient norm is predicted from: ratio, last
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.memory import SlotPool
from lightning_zenflow.deferred.provisional_update import ProvisionalUpdate
from lightning_zenflow.step.fill import Fill
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.topk.selector import Selector
from lightning_zenflow.worker.rank_state import RankState

CHECKPOINT_KEY = "zenflow"
"""In DeepSpeed's optimizer state of a rank; DeepSpeed itself reads the keys it knows only."""

VERSION = 5
"""Number of the layout; a checkpoint of another one is refused."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of the step of one rank, built together; each is documented where it is defined."""

    rank: RankState
    slots: SlotPool
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


class RunState:
    """Collects the state of the components right after a flush, and restores it."""

    def __init__(self, config: ZenFlowConfig, world_size: int, parts: StepParts) -> None:
        self._parts = parts
        self._layout: dict[str, Any] = {
            "config": config.numeric_values(),
            "world_size": world_size,
            "slices": [(s.begin, s.start, s.numel, s.columns) for s in parts.rank.partition.slices],
        }

    def state_dict(self, *, step: int, skipped: int, trained: Sequence[bool]) -> dict[str, Any]:
        """State after `step` steps, of which `skipped` changed nothing; `trained` is of `Freezing`."""
        return {
            "version": VERSION,
            "layout": self._layout,
            "step": step,
            "skipped": skipped,
            "trained": trained,
            "ownership": self._parts.ownership.state_dict(),
            "planner": self._parts.planner.state_dict(),
            "provisional": self._parts.provisional.state_dict(),
            "in_backward": self._parts.fill.norms.state_dict(),
        }

    def difference(self, state: Mapping[str, Any]) -> str:
        """Reason why a run cannot continue another one bit for bit; empty if it can."""
        theirs = state["layout"]
        if theirs["world_size"] != self._layout["world_size"]:
            return f"it was saved by {theirs['world_size']} ranks, these are {self._layout['world_size']}"
        config, saved = self._layout["config"], theirs["config"]
        for key in {**config, **saved}:
            if key not in config:
                return f"it was saved with {key}={saved[key]!r}, a key that no longer exists"
            if saved.get(key) != config[key]:
                return f"it was saved with {key}={saved.get(key)!r}, now it is {config[key]!r}"
        return "" if theirs == self._layout else "its partition is another"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; AdamW's state has been loaded into the arena."""
        self._parts.planner.load_state_dict(state["planner"])
        self._parts.ownership.load_state_dict(state["ownership"], self._parts.planner.tail)
        self._parts.provisional.load_state_dict(state["provisional"])
        self._parts.fill.norms.load_state_dict(state["in_backward"])
