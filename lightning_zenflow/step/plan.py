"""Planning of steps: synchronous or asynchronous, measuring, selecting, changing the schedule."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.step.auto_control import ScheduleControl
from lightning_zenflow.step.context import StepPlan
from lightning_zenflow.topk.selector import Selector


class Planner:
    """Plans the steps, alike on every rank.

    A selection and a change of the schedule never overlap, because changing columns relies on the distance between a block's jobs: the
    schedule waits for a selection to reach all blocks, and nothing is selected while the schedule waits.

    Args:
        jobs: their schedule is changed.
        control: measures and decides on the schedule; None if S and d are given.
        selector: selects columns.
    """

    def __init__(
        self, config: ZenFlowConfig, jobs: JobQueue, control: ScheduleControl | None, selector: Selector
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._control = control
        self._selector = selector
        self._synchronous_until = self._changing_until = 0

    @property
    def _wants_columns(self) -> bool:
        """Whether some weights are late, so that the device gains by updating others at once."""
        return self._config.owned_ratio > 0 and not self._jobs.schedule.is_immediate

    @property
    def _awaits_selection(self) -> bool:
        return self._wants_columns and not self._selector.has_selected

    def start_over(self, step: int, count: int) -> None:
        """Makes the next steps synchronous: the rest of the warm-up, and until columns are selected where some are wanted.

        Args:
            step: last step so far.
            count: number of applied steps; the warm-up is not repeated after a checkpoint is loaded.
        """
        self._selector.start_over()
        self._changing_until = step
        self._synchronous_until = step + max(self._awaits_selection, self._config.full_warm_up_rounds - count)

    def state_dict(self) -> dict[str, Any]:
        """State that later plans depend on."""
        return {
            "synchronous_until": self._synchronous_until,
            "changing_until": self._changing_until,
            "selector": self._selector.state_dict(),
            "schedule": None if self._control is None else self._control.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; sets the schedule of the jobs as well."""
        self._synchronous_until, self._changing_until = state["synchronous_until"], state["changing_until"]
        self._selector.load_state_dict(state["selector"])
        if self._control is not None and state["schedule"] is not None:
            self._control.load_state_dict(state["schedule"])
        self.apply_schedule()

    def plan(self, step: int) -> StepPlan:
        """Plan of the next step."""
        wants_columns = self._wants_columns
        synchronous = step <= self._synchronous_until
        may_change = step >= self._synchronous_until and not (self._control is not None and self._control.waits(step))
        selects = may_change and wants_columns and self._selector.is_due(step)
        releases = may_change and not wants_columns and self._selector.has_selected
        in_backward = self._config.submits_in_backward and self._jobs.schedule.publish_lag == 0
        return StepPlan(
            synchronous=synchronous,
            shows_exact_weights=synchronous or self._jobs.schedule.is_immediate,
            # In a step that changes columns, windows must end after the change.
            submits_in_backward=in_backward and not (synchronous or selects or releases),
            selects=selects,
            releases=releases,
        )

    def columns_change(self, step: int) -> None:
        """Notes new columns in `step`: blocks change from now on, each with its own next window."""
        self._changing_until = step + self._jobs.max_publish_delay

    def apply_schedule(self) -> None:
        """Gives the jobs the schedule that was decided on last; also after an exception has interrupted that, right after a flush."""
        if self._control is not None:
            self._jobs.set_schedule(self._control.schedule)

    def interrupt(self) -> None:
        """Leaves the next steps out of what is measured, after something other than training has run between two steps."""
        if self._control is not None:
            self._control.interrupt()

    def end_step(self, step: int, plan: StepPlan) -> None:
        """Changes the schedule where that is due, and logs the change.

        Args:
            step: step that has ended.
            plan: plan of the step.
        """
        if plan.synchronous and self._awaits_selection:
            # The gradient was not finite; nothing could be selected.
            self._synchronous_until = max(self._synchronous_until, step + 1)
        if self._control is None:
            return
        before = self._control.schedule
        reason = self._control.end_step(step, plan, may_change=step >= self._changing_until)
        if reason is None:
            return
        self.apply_schedule()
        now = self._control.schedule
        change = f"update_interval={now.update_interval}, publish_lag={now.publish_lag}"
        change += f" (before: {before.update_interval}, {before.publish_lag})"
        rank_zero_info(f"ZenFlow: after step {step} {change}: {reason}")
