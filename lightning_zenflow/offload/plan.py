"""State of the step that is next, its inputs, which are fixed when the backward pass of its last micro-batch begins, and its kind:
synchronous or asynchronous, measuring, selecting, changing the schedule (`update_interval: auto`, `publish_lag: auto`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.core.schedule import SchedulePolicy, StaggeredSchedule, UpdateSchedule, load_and_stall
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.selection import ColumnSquaredNorms, Selector

if TYPE_CHECKING:
    from lightning_zenflow.offload.jobs import JobQueue


class StepState(Enum):
    """State of the step that is next, and what `ZenFlowStep` has of it."""

    IDLE = auto()
    """No backward pass since the last step: `micro_batches` is 0, there is no context and no norm."""
    ACCUMULATING = auto()
    """The last micro-batch's backward pass has not begun: `micro_batches` is more than 0, there is no context."""
    OPEN = auto()
    """It has begun, or is over: the step's `StepContext` is fixed. No more gradients are received once there is a squared norm."""
    UNDER_WAY = auto()
    """A change between these, or the phases behind *reduce*. If it is found by a later call, an exception has interrupted them."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the optimizer around a step decides."""

    groups: Sequence[GroupHyperparameters]
    """Hyperparameters of each parameter group."""
    loss_scale: float
    """Factor that the loss is multiplied by before backward."""
    max_norm: float
    """Largest norm of the whole gradient after clipping; 0: no clipping."""
    factor: torch.Tensor | None = None
    """Factor that the user's code has put on all gradients: 0-D float32, on the device or the CPU."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One optimizer step, passed along with its gradients; its kind is the same on every rank."""

    number: int
    """Counted from 1."""
    inputs: StepInputs
    """Read as backward begins; `ZenFlowStep.step` reads hyperparameters and largest norm again."""
    schedule: StaggeredSchedule
    """S and d of each block."""
    synchronous: bool
    """Every window closes and is published in the step itself, exactly."""
    submits_in_backward: bool
    """Blocks whose window closes are submitted as soon as their gradient is complete."""
    column_norms: ColumnSquaredNorms | None
    """Sums for the column proxies, which decide on new columns, in synchronous steps only; None in steps that do not select."""
    releases: bool
    """The device gives up its columns, because nothing is late any more; in synchronous steps only."""

    @property
    def shows_exact_weights(self) -> bool:
        """The step ends with weights that have all of its gradients, so that no provisional update is needed."""
        return self.synchronous or self.schedule.is_immediate

    @property
    def changes_columns(self) -> bool:
        """The device owns other columns, or none, from the end of the step on."""
        return self.column_norms is not None or self.releases


_LOOK = 16
"""Steps that are measured before a look, at least S of them."""


class ScheduleControl:
    """Measures steps, reduces what it measured over the ranks, lets the policy decide, and measures again.

    All ranks decide alike at the same steps.

    Not measured are the first steps, which compile and touch memory, the steps right after a decision, whose windows may still have the
    old length, and the steps around an interruption such as a validation. Used by one rank's training thread only. Never waits for the
    device: reduced numbers are read some steps later.

    Args:
        auto: the policy.
        rank: its clocks are read.
    """

    def __init__(self, auto: SchedulePolicy, rank: RankState) -> None:
        self._auto = auto
        self._rank = rank
        self._steps: list[tuple[float, float, float]] = []  # see `load_and_stall`
        self._sent: tuple[int, AsyncHostCopy] | None = None
        """Step at whose end the reduced numbers can be read, and these numbers (see `_reduce`)."""
        self.interrupt()

    @property
    def schedule(self) -> UpdateSchedule:
        """The current schedule."""
        return self._auto.schedule

    def state_dict(self) -> dict[str, Any]:
        """The schedule, as plain numbers. Excludes measured steps."""
        return asdict(self.schedule)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._auto.restore(UpdateSchedule(**state))
        self._sent = None
        self._steps.clear()
        self.interrupt()

    def interrupt(self, longest: int = 0) -> None:
        """Leaves out the next steps, after a synchronous step, a flush, or a look. Open windows have at most `longest` steps, or S."""
        s, d = self.schedule.update_interval, self.schedule.publish_lag
        # One step more: the time of the first step after an interruption includes the interruption.
        self._left_out = 1 + max(s, longest) + d
        self._last = self._clocks()

    def end_step(self, context: StepContext) -> str | None:
        """Adds a step to the measured ones; reduces them when they are enough, or reads what was reduced and decides.

        Args:
            context: the step. One that changes columns waits for reasons of its own and is left out. In another synchronous one the worker
                computes for one gradient, as with S = 1, and its wait is not the schedule's.

        Returns:
            Reason of a change of `schedule`; None if it does not change.
        """
        step, last, self._last = context.number, self._last, self._clocks()
        duration, waited, worker = (now - before for now, before in zip(self._last, last, strict=True))
        if context.synchronous and self.schedule.update_interval > 1 and not context.changes_columns:
            self.interrupt()
        elif self._left_out and not context.changes_columns:
            self._left_out -= 1
        elif self._sent is None and not context.changes_columns:
            self._steps.append((max(0.0, duration - waited), worker, 0.0 if context.synchronous else waited))
        if self._sent is None and len(self._steps) == max(_LOOK, self.schedule.update_interval):
            load, stall = load_and_stall(self._steps)
            # The jobs published at that step are submitted after this one, so the device has finished the reduction before.
            readable = step + self.schedule.publish_lag + 1
            self._sent = readable, self._reduce(load, stall)
        if self._sent is None or step < self._sent[0]:
            return None
        load, stall = self._sent[1].read().tolist()
        self._sent = None
        self._steps.clear()
        longest = self.schedule.update_interval
        reason = self._auto.observe(load, stall)
        self.interrupt(longest)
        return reason

    def _clocks(self) -> tuple[float, float, float]:
        telemetry = self._rank.telemetry
        return time.perf_counter(), telemetry.device_s, telemetry.worker_busy_s

    def _reduce(self, load: float, stall: float) -> AsyncHostCopy:
        """The largest of all ranks, float64: [load, stall]."""
        local = torch.tensor([load, stall], dtype=torch.float64, device="cpu")
        runtime = runtime_of(self._rank.device)
        # From page-locked memory, so that the host does not wait for the copy.
        values = runtime.to_device(runtime.empty_on_host(local.shape, local.dtype).copy_(local))
        if self._rank.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._rank.group)
        return AsyncHostCopy(values)


class Planner:
    """Plans the steps, alike on every rank. The device's columns change in synchronous steps, behind which the arena is exact.

    Args:
        jobs: their schedule is changed.
        control: measures and decides on the schedule; None if S and d are given.
        selector: selects columns.

    Attributes:
        has_single_backward: in manual optimization, whether the last closure of a step had one backward pass, so that the first one of the
            next closure is taken for its last.
    """

    def __init__(
        self, config: ZenFlowConfig, jobs: "JobQueue", control: ScheduleControl | None, selector: Selector
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._control = control
        self._selector = selector
        self._synchronous_until = 0
        self.has_single_backward = False

    def start_over(self, step: int, count: int, *, shows_exact: bool = False) -> None:
        """Forgets the selection; makes the rest of the warm-up synchronous, in whose last step columns are selected where some are wanted.

        Args:
            step: last step so far.
            count: number of applied steps; the warm-up is not repeated after a checkpoint is loaded.
            shows_exact: whether the model must show exact weights behind the next step.
        """
        self._selector.start_over()
        is_late = shows_exact and not self._jobs.schedule.is_immediate
        self._synchronous_until = step + max(is_late, self._config.full_warm_up_rounds - count)

    def state_dict(self) -> dict[str, Any]:
        """State that later plans depend on."""
        return {
            "synchronous_until": self._synchronous_until,
            # For earlier versions, which changed the columns block by block.
            "changing_until": 0,
            "selector": self._selector.state_dict(),
            "schedule": None if self._control is None else self._control.state_dict(),
            "single_backward": self.has_single_backward,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; sets the schedule of the jobs as well."""
        self._synchronous_until = state["synchronous_until"]
        self._selector.load_state_dict(state["selector"])
        if self._control is not None and state["schedule"] is not None:
            self._control.load_state_dict(state["schedule"])
        self.apply_schedule()
        # Earlier checkpoints do not say.
        self.has_single_backward = state.get("single_backward", False)

    def plan(self, step: int, inputs: StepInputs) -> StepContext:
        """Plan of the next step."""
        schedule = self._jobs.schedule
        # Where some weights are late, the device gains by updating others at once.
        wants_columns = self._config.owned_ratio > 0 and not schedule.is_immediate
        may_change = step >= self._synchronous_until
        selects = may_change and wants_columns and self._selector.is_due(step)
        releases = may_change and not wants_columns and self._selector.owned is not None
        synchronous = step <= self._synchronous_until or selects or releases
        return StepContext(
            number=step,
            inputs=inputs,
            schedule=schedule,
            synchronous=synchronous,
            submits_in_backward=self._config.submits_in_backward and schedule.publish_lag == 0 and not synchronous,
            column_norms=self._selector.new_column_norms() if selects else None,
            releases=releases,
        )

    def apply_schedule(self) -> None:
        """Gives the jobs the schedule that was decided on last; also after an exception has interrupted that, right after a flush."""
        if self._control is not None:
            self._jobs.set_schedule(self._control.schedule)

    def interrupt(self) -> None:
        """Leaves the next steps out of what is measured, after something other than training has run between two steps."""
        if self._control is not None:
            self._control.interrupt()

    def end_step(self, context: StepContext) -> None:
        """Changes the schedule where that is due behind a step, and logs the change."""
        if self._control is None:
            return
        before = self._control.schedule
        reason = self._control.end_step(context)
        if reason is None:
            return
        self.apply_schedule()
        now = self._control.schedule
        change = f"update_interval={now.update_interval}, publish_lag={now.publish_lag}"
        change += f" (before: {before.update_interval}, {before.publish_lag})"
        rank_zero_info(f"ZenFlow: after step {context.number} {change}: {reason}")
