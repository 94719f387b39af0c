"""Changes of schedule at given steps instead of measured ones, so that tests do not depend on time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_zenflow.core.schedule import UpdateSchedule
from lightning_zenflow.offload.plan import SchedulePolicy
from lightning_zenflow.offload.rank_state import StepContext

Entry = tuple[int, int, int] | tuple[int, int, int, float]
"""Step, S and d; or with the share of the blocks that the device is to own from there on."""


class ScriptedSchedule:
    """Stands in for `ScheduleControl`; changes to each schedule after its step.

    Args:
        script: ascending.
        auto: gives the first schedule.
    """

    def __init__(self, script: Sequence[Entry], auto: SchedulePolicy) -> None:
        self._script = list(script)
        self.schedule, self.resident_share = auto.schedule, 0.0
        self.changes: list[tuple[int, UpdateSchedule]] = []
        """(step after which it changed, to what)."""

    def restore(self, schedule: UpdateSchedule) -> None:
        """As `ScheduleControl.restore`."""
        self.schedule = schedule

    def interrupt(self) -> None:
        """No effect: nothing is measured."""

    def end_step(self, context: StepContext) -> str | None:
        """As `ScheduleControl.end_step`."""
        step = context.number
        if not self._script or step < self._script[0][0]:
            return None
        _, update_interval, publish_lag, *share = self._script.pop(0)
        before, self.schedule = self.schedule, UpdateSchedule(update_interval=update_interval, publish_lag=publish_lag)
        self.changes.append((step, self.schedule))
        self.resident_share = share[0] if share else self.resident_share
        return "the script says so" if share or self.schedule != before else None


@contextmanager
def scripted(script: Sequence[Entry]) -> Iterator[list[ScriptedSchedule]]:
    """Optimizers that are built inside follow the script; their schedules are appended to the list."""
    built: list[ScriptedSchedule] = []

    def build(auto: SchedulePolicy, *_: Any, **__: Any) -> ScriptedSchedule:
        built.append(ScriptedSchedule(script, auto))
        return built[-1]

    with mock.patch("lightning_zenflow.offload.build.ScheduleControl", build):
        yield built
