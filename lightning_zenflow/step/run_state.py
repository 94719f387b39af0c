"""What a checkpoint needs besides AdamW's state, so that the run that loads it continues bit for bit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.provisional import ProvisionalUpdate
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.topk.ownership import Ownership

CHECKPOINT_KEY = "zenflow"
"""In DeepSpeed's optimizer state of a rank; DeepSpeed itself reads the keys it knows only."""

VERSION = 2
"""Of what `RunState` writes; one more with every change that an older version would misread."""

_WITHOUT_EFFECT = (
    "worker_cores",
    "pt_reserved_cores_perc",
    "worker_timeout",
    "max_worker_restarts",
    "offload",
    "accumulate_on",
    "stall_monitor",
    "timeline",
    "timeline_steps",
)
"""Keys of the configuration that change no number."""


class RunState:
    """Collects and hands back the state of the parts, right after a flush; plain numbers and tensors.

    Args:
        config: the configuration.
        partition: the rank's partition.
        world_size: ranks that share the model.
        jobs: whose counts belong to it.
        ownership: whose columns belong to it.
        planner: whose selector and schedule belong to it.
        provisional: whose squared_norms and noise belong to it, if there is one.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        partition: Partition,
        world_size: int,
        *,
        jobs: JobQueue,
        ownership: Ownership,
        planner: Planner,
        provisional: ProvisionalUpdate | None,
    ) -> None:
        values = dataclasses.asdict(config)
        self._layout: dict[str, Any] = {
            "config": {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT},
            "world_size": world_size,
            "slices": [(s.begin, s.start, s.numel, s.columns) for s in partition.slices],
        }
        self._jobs = jobs
        self._ownership = ownership
        self._planner = planner
        self._provisional = provisional

    def state_dict(self, *, step: int, skipped: int) -> dict[str, Any]:
        """The state after `step`, of which `skipped` changed nothing."""
        return {
            "version": VERSION,
            "layout": self._layout,
            "step": step,
            "skipped": skipped,
            "n_updates": self._jobs.n_updates,
            "ownership": self._ownership.state_dict(),
            "planner": self._planner.state_dict(),
            "provisional": None if self._provisional is None else self._provisional.state_dict(),
        }

    def difference(self, state: Mapping[str, Any]) -> str:
        """What keeps a run from continuing another one bit for bit; empty if nothing does."""
        if state["version"] != VERSION:
            return f"an older lightning-zenflow wrote it (its layout is {state['version']}, now it is {VERSION})"
        theirs = state["layout"]
        if theirs["world_size"] != self._layout["world_size"]:
            return f"it was saved by {theirs['world_size']} ranks, these are {self._layout['world_size']}"
        for key, value in self._layout["config"].items():
            if theirs["config"].get(key) != value:
                return f"it was saved with {key}={theirs['config'].get(key)!r}, now it is {value!r}"
        return "" if theirs == self._layout else "its partition is another"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hands the state to the parts; AdamW's is in the arena by now."""
        self._jobs.n_updates = state["n_updates"]
        self._planner.load_state_dict(state["planner"])
        self._ownership.load_state_dict(state["ownership"])
        if self._provisional is not None:
            self._provisional.load_state_dict(state["provisional"])
