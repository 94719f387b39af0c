"""State of the step that is next, and its inputs, which are fixed when the backward pass of its last micro-batch begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.schedule.staggered import StaggeredSchedule
from lightning_zenflow.topk.selector import ColumnSquaredNorms


class StepState(Enum):
    """State of the step that is next."""

    IDLE = auto()
    """No backward pass since the last step."""
    ACCUMULATING = auto()
    """The last micro-batch's backward pass has not begun."""
    OPEN = auto()
    """It has begun, or is over; the step's `StepContext` is fixed."""
    REDUCED = auto()
    """The gradient norm is known, and no more gradients are received."""
    UNDER_WAY = auto()
    """A change between these, or the phases behind *reduce*. If it is found by a later call, an exception has interrupted them."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Kind of one step; the same on every rank."""

    synchronous: bool
    """Every window closes and is published in the step itself, exactly."""
    shows_exact_weights: bool
    """The step ends with weights that have all of its gradients, so that no provisional update is needed."""
    submits_in_backward: bool
    """Blocks whose window closes are submitted as soon as their gradient is complete."""
    selects: bool
    """Column proxies are added up and decide on new columns."""
    releases: bool
    """The device gives up its columns, because nothing is late any more."""

    @property
    def changes_columns(self) -> bool:
        """Blocks change their columns from this step on, each with its own next window."""
        return self.selects or self.releases


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the optimizer around a step decides."""

    groups: Sequence[GroupHyperparameters]
    """Hyperparameters of each parameter group."""
    loss_scale: float
    """Factor that the loss is multiplied by before backward."""
    max_norm: float
    """Largest norm of the whole gradient after clipping; 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One optimizer step, passed along with its gradients."""

    number: int
    """Counted from 1."""
    plan: StepPlan
    inputs: StepInputs
    """Read as backward begins; `ZenFlowStep.step` reads hyperparameters and largest norm again."""
    schedule: StaggeredSchedule
    """S and d of each block."""
    column_norms: ColumnSquaredNorms | None
    """Sums for the column proxies; None in steps that do not select."""
