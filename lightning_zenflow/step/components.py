"""Components of an optimizer step."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.deferred.provisional_update import ProvisionalUpdate
from lightning_zenflow.deferred.slots import SlotPool
from lightning_zenflow.step.gradient_router import GradientRouter
from lightning_zenflow.step.plan import Planner
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.step.run_state import RunState
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.topk.selector import Selector
from lightning_zenflow.worker.rank_state import RankState


class CountedState(Protocol):
    """Interface of the user's optimizer, whose state the arena holds."""

    def write_count(self, count: int) -> None:
        """Writes the number of applied steps, as checkpoints hold it."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of the step of one rank, built together; each is documented where it is defined."""

    rank: RankState
    slots: SlotPool
    jobs: JobQueue
    ownership: Ownership
    provisional: ProvisionalUpdate
    router: GradientRouter
    selector: Selector
    planner: Planner
    run_state: RunState
    counters: CounterReader
    host_state: CountedState
    skipped: Tensor
    """0-D int64 on the device: steps that changed nothing because their gradient norm was not finite."""
