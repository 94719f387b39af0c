"""Changes of schedule at given steps instead of measured ones, so that tests do not depend on time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch import distributed as dist

from lightning_zenflow.schedule.auto_control import StepKind
from lightning_zenflow.schedule.auto_policy import Decision, SchedulePolicy
from lightning_zenflow.schedule.staggered import UpdateSchedule

Entry = (
    tuple[int, int, int]
    | tuple[int, int, int, tuple[int, ...], bool]
    | tuple[int, int, int, tuple[int, ...], bool, int]
)
"""Step, S and d; and perhaps the blocks of the tail, and whether the device owns it; and perhaps the only rank that has a tail."""


class ScriptedSchedule:
    """Stands in for `ScheduleControl`; changes to each schedule as soon as allowed from its step on.

    Args:
        script: ascending.
        auto: gives the first schedule.
    """

    def __init__(self, script: Sequence[Entry], auto: SchedulePolicy) -> None:
        self._script = list(script)
        self.tail: frozenset[int] = frozenset()
        self.tail_share = 0.0
        """As `ScheduleControl.tail_share`, of 16 blocks: the same on every rank."""
        self.owns_tail = False
        self.schedule = auto.schedule
        self.changes: list[tuple[int, UpdateSchedule]] = []
        """(step after which it changed, to what)."""
        self.observes_next = True
        self.waits = False

    def state_dict(self) -> dict[str, Any]:
        """As `ScheduleControl.state_dict`."""
        schedule = {"update_interval": self.schedule.update_interval, "publish_lag": self.schedule.publish_lag}
        tail = {"tail": sorted(self.tail), "tail_share": self.tail_share, "owns_tail": self.owns_tail}
        return {"schedule": schedule, **tail}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `ScheduleControl.load_state_dict`."""
        self.schedule = UpdateSchedule(**state["schedule"])
        self.tail, self.tail_share = frozenset(state["tail"]), state["tail_share"]
        self.owns_tail = state["owns_tail"]

    @property
    def largest_tail_share(self) -> float:
        """As `ScheduleControl.largest_tail_share`."""
        return self.tail_share

    def interrupt(self) -> None:
        """No effect: nothing is measured."""

    def end_step(
        self, step: int, plan: StepKind, *, max_interval_by_gradients: Tensor | None, may_change: bool
    ) -> Decision | None:
        """As `ScheduleControl.end_step`."""
        due = bool(self._script) and step >= self._script[0][0]
        self.waits = due and not may_change
        if not due or self.waits:
            return None
        _, update_interval, publish_lag, *tail = self._script.pop(0)
        if tail:
            blocks, self.owns_tail, *only_rank = tail
            self.tail_share = len(blocks) / 16
            self.tail = frozenset(blocks if not only_rank or dist.get_rank() == only_rank[0] else ())
        self.schedule = UpdateSchedule(update_interval=update_interval, publish_lag=publish_lag)
        self.changes.append((step, self.schedule))
        return Decision(schedule=self.schedule, tail=self.tail_share, reason="the script says so")


@contextmanager
def scripted(script: Sequence[Entry]) -> Iterator[list[ScriptedSchedule]]:
    """Optimizers that are built inside follow the script; their schedules are appended to the list."""
    built: list[ScriptedSchedule] = []

    def build(auto: SchedulePolicy, **_: Any) -> ScriptedSchedule:
        built.append(ScriptedSchedule(script, auto))
        return built[-1]

    with mock.patch("lightning_zenflow.zero.build.ScheduleControl", build):
        yield built
