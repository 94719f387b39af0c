"""Changes of pace at given steps instead of measured ones, so that tests do not depend on time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_zenflow.auto_schedule import AutoSchedule, Decision, Pace


class ScriptedPace:
    """Has `PaceControl`'s interface; takes each pace as soon as it may from its step on.

    Args:
        script: (step, S, d), ascending.
        auto: only its start counts.
    """

    def __init__(self, script: Sequence[tuple[int, int, int]], auto: AutoSchedule) -> None:
        self._script = list(script)
        self.pace = auto.pace
        self.changes: list[tuple[int, Pace]] = []
        """(step after which it changed, to what)."""
        self.observes_next = True
        self.waits = False

    def state_dict(self) -> dict[str, Any]:
        """As `PaceControl.state_dict`."""
        return {"update_interval": self.pace.update_interval, "publish_lag": self.pace.publish_lag}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `PaceControl.load_state_dict`."""
        self.pace = Pace(**state)

    def interrupt(self) -> None:
        """Nothing is measured."""

    def end_step(self, step: int, *, deferral: Tensor | None, may_change: bool) -> Decision | None:
        """As `PaceControl.end_step`."""
        due = bool(self._script) and step >= self._script[0][0]
        self.waits = due and not may_change
        if not due or self.waits:
            return None
        _, update_interval, publish_lag = self._script.pop(0)
        self.pace = Pace(update_interval=update_interval, publish_lag=publish_lag)
        self.changes.append((step, self.pace))
        return Decision(pace=self.pace, reason="the script says so")


@contextmanager
def scripted(script: Sequence[tuple[int, int, int]]) -> Iterator[list[ScriptedPace]]:
    """Optimizers that are built inside follow the script; they are appended to the list."""
    built: list[ScriptedPace] = []

    def build(auto: AutoSchedule, **_: Any) -> ScriptedPace:
        built.append(ScriptedPace(script, auto))
        return built[-1]

    with mock.patch("lightning_zenflow.assembly.PaceControl", build):
        yield built
