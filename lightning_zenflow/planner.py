"""What each step does besides the update: whether it is synchronous, measures the proxies, selects, changes the pace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.pace_control import PaceControl
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.selector import Selector


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
    """Plans one step after the other. A selection and a change of pace never overlap: changing columns counts on each block's rounds being
    far apart, so the pace waits; and while it waits, nothing is selected anew.

    Args:
        config: the configuration.
        rounds: whose pace is changed.
        pace: measures and decides on it; None if there is nothing to decide.
        new_selector: makes a selector that has selected nothing yet.
    """

    def __init__(
        self, config: ZenFlowConfig, rounds: Rounds, pace: PaceControl | None, new_selector: Callable[[], Selector]
    ) -> None:
        self._config = config
        self._rounds = rounds
        self.pace = pace
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
            "pace": None if self.pace is None else self.pace.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; also sets the pace of the rounds."""
        self._synchronous_until, self._changing_until = state["synchronous_until"], state["changing_until"]
        self.selector.load_state_dict(state["selector"])
        if self.pace is not None and state["pace"] is not None:
            self.pace.load_state_dict(state["pace"])
            self._rounds.set_pace(self.pace.pace)

    def plan(self, step: int) -> StepPlan:
        """The plan of a step that comes next."""
        selects_any = self._config.topk_ratio > 0
        awaits_selection = selects_any and self.selector.n_selections == 0
        synchronous = step <= self._synchronous_until or awaits_selection
        pace_waits = self.pace is not None and self.pace.waits
        selects = selects_any and step >= self._synchronous_until and self.selector.measures(step) and not pace_waits
        observes = self.pace is not None and self.pace.observes_next
        return StepPlan(
            synchronous=synchronous,
            shows_exact_weights=synchronous or self._rounds.publishes_at_once,
            measures=selects or (selects_any and observes),
            selects=selects,
        )

    def selected(self, step: int) -> None:
        """Blocks change their columns from `step` on, each with its own next window."""
        self._changing_until = step + self._rounds.age

    def interrupt(self) -> None:
        """Something came between two steps, and time with it."""
        if self.pace is not None:
            self.pace.interrupt()

    def end_step(self, step: int, plan: StepPlan, deferral: Tensor | None) -> None:
        """Changes the pace where that is due, which is logged.

        Args:
            step: that has ended.
            plan: its plan.
            deferral: what the gradient rule saw in it (`selection.deferral`), if anything.
        """
        if self.pace is None:
            return
        if plan.synchronous:
            self.pace.interrupt()
            return
        before = self.pace.pace
        decision = self.pace.end_step(step, deferral=deferral, may_change=step >= self._changing_until)
        if decision is not None:
            self._rounds.set_pace(decision.pace)
            rank_zero_info(
                f"ZenFlow: from step {step + 1} on update_interval={decision.pace.update_interval},"
                f" publish_lag={decision.pace.publish_lag} (before: {before.update_interval}, {before.publish_lag}): {decision.reason}"
            )
