"""Changes of schedule at given steps instead of measured ones, so that tests do not depend on time."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import distributed as dist

from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.step.context import StepPlan

Entry = tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]] | tuple[int, int, int, tuple[int, ...], int]
"""Step, S and d; and perhaps the blocks of the tail; and perhaps the only rank that has one. If both S or d and the tail change, the tail
does so at the next step that allows it."""


class ScriptedSchedule:
    """Stands in for `ScheduleControl`; changes to each schedule as soon as allowed from its step on.

    Args:
        script: ascending.
        auto: gives the first schedule.
    """

    def __init__(self, script: Sequence[Entry], auto: SchedulePolicy) -> None:
        self._script = list(script)
        self.tail: frozenset[int] = frozenset()
        self.schedule = auto.schedule
        self.changes: list[tuple[int, UpdateSchedule]] = []
        """(step after which it changed, to what)."""
        self._waits = False

    def state_dict(self) -> dict[str, Any]:
        """As `ScheduleControl.state_dict`."""
        return {**dataclasses.asdict(self.schedule), "tail": len(self.tail) / 16, "tail_blocks": sorted(self.tail)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `ScheduleControl.load_state_dict`."""
        self.schedule = UpdateSchedule(update_interval=state["update_interval"], publish_lag=state["publish_lag"])
        self.tail = frozenset(state["tail_blocks"])

    def waits(self, step: int) -> bool:
        """As `ScheduleControl.waits`."""
        return self._waits

    def interrupt(self) -> None:
        """No effect: nothing is measured."""

    def end_step(self, step: int, plan: StepPlan, *, may_change: bool) -> str | None:
        """As `ScheduleControl.end_step`."""
        due = bool(self._script) and step >= self._script[0][0]
        self._waits = due and not may_change
        if not due or self._waits:
            return None
        _, update_interval, publish_lag, *tail = self._script[0]
        before, self.schedule = self.schedule, UpdateSchedule(update_interval=update_interval, publish_lag=publish_lag)
        changes = self.schedule != before
        if not (changes and tail):
            self._script.pop(0)
            self.changes.append((step, self.schedule))
        if not changes and tail:
            blocks, *only_rank = tail
            self.tail = frozenset(blocks if not only_rank or dist.get_rank() == only_rank[0] else ())
        return "the script says so" if changes or tail else None


@contextmanager
def scripted(script: Sequence[Entry]) -> Iterator[list[ScriptedSchedule]]:
    """Optimizers that are built inside follow the script; their schedules are appended to the list."""
    built: list[ScriptedSchedule] = []

    def build(auto: SchedulePolicy, *_: Any, **__: Any) -> ScriptedSchedule:
        built.append(ScriptedSchedule(script, auto))
        return built[-1]

    with mock.patch("lightning_zenflow.engine.build.ScheduleControl", build):
        yield built
