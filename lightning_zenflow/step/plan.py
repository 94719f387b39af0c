"""What each step does besides the update: whether it is synchronous, measures the proxies, selects, changes the schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.schedule.auto_control import ScheduleControl
from lightning_zenflow.topk.selector import Selector


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What is to be done in one step; the same on every rank."""

    synchronous: bool
    """Every window closes and is published in the step itself, exactly."""
    shows_exact_weights: bool
    """Whether the step ends with weights that have all of its gradients, so that nothing needs to stand in for them."""
    measures: bool
    """Whether column proxies are added up."""
    selects: bool
    """Whether they decide on the columns."""


class Planner:
    """Plans one step after the other. A selection and a change of schedule never overlap: changing columns counts on each block's jobs being
    far apart, so the schedule waits; and while it waits, nothing is selected anew.

    Args:
        config: the configuration.
        jobs: whose schedule is changed.
        schedule: measures and decides on it; None if there is nothing to decide.
        new_selector: makes a selector that has selected nothing yet.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        jobs: JobQueue,
        schedule: ScheduleControl | None,
        new_selector: Callable[[], Selector],
    ) -> None:
        self._config = config
        self._jobs = jobs
        self.schedule = schedule
        """None if S and d are given."""
        self._new_selector = new_selector
        self.selector = new_selector()
        """The present one."""
        self._synchronous_until = self._changing_until = 0

    def start_over(self, step: int, count: int) -> None:
        """Nothing is device-owned until the last synchronous step has measured the proxies: the last of the warm-up, or the next one.

        Args:
            step: the last step so far.
            count: steps applied so far; those of the warm-up are not repeated after loading a checkpoint.
        """
        self._changing_until = step
        self._synchronous_until = step + max(0, self._config.full_warm_up_rounds - count)
        self.selector = self._new_selector()

    def state_dict(self) -> dict[str, Any]:
        """What later plans depend on."""
        return {
            "synchronous_until": self._synchronous_until,
            "changing_until": self._changing_until,
            "selector": self.selector.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; also sets the schedule of the jobs."""
        self._synchronous_until, self._changing_until = state["synchronous_until"], state["changing_until"]
        self.selector.load_state_dict(state["selector"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
            self._jobs.set_schedule(self.schedule.schedule)

    def plan(self, step: int) -> StepPlan:
        """The plan of a step that comes next."""
        selects_any = self._config.topk_ratio > 0
        awaits_selection = selects_any and self.selector.n_selections == 0
        synchronous = step <= self._synchronous_until or awaits_selection
        schedule_waits = self.schedule is not None and self.schedule.waits
        selects = (
            selects_any and step >= self._synchronous_until and self.selector.measures(step) and not schedule_waits
        )
        observes = self.schedule is not None and self.schedule.observes_next
        return StepPlan(
            synchronous=synchronous,
            shows_exact_weights=synchronous or self._jobs.publishes_at_once,
            measures=selects or (selects_any and observes),
            selects=selects,
        )

    def selected(self, step: int) -> None:
        """Blocks change their columns from `step` on, each with its own next window."""
        self._changing_until = step + self._jobs.age

    def interrupt(self) -> None:
        """Something came between two steps, and time with it."""
        if self.schedule is not None:
            self.schedule.interrupt()

    def end_step(self, step: int, plan: StepPlan, max_interval_by_gradients: Tensor | None) -> None:
        """Changes the schedule where that is due, which is logged.

        Args:
            step: that has ended.
            plan: its plan.
            max_interval_by_gradients: what the gradient rule saw in it (`selection.max_interval_by_gradients`), if anything.
        """
        if self.schedule is None:
            return
        if plan.synchronous:
            self.schedule.interrupt()
            return
        before = self.schedule.schedule
        decision = self.schedule.end_step(
            step, max_interval_by_gradients=max_interval_by_gradients, may_change=step >= self._changing_until
        )
        if decision is not None:
            self._jobs.set_schedule(decision.schedule)
            rank_zero_info(
                f"ZenFlow: from step {step + 1} on update_interval={decision.schedule.update_interval},"
                f" publish_lag={decision.schedule.publish_lag} (before: {before.update_interval}, {before.publish_lag}): {decision.reason}"
            )
