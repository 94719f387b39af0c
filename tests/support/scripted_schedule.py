"""Changes of schedule at given steps instead of measured ones, so that tests do not depend on time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from lightning_zenflow.core.schedule import UpdateSchedule
from lightning_zenflow.offload.plan import ScheduleControl
from lightning_zenflow.offload.rank_state import StepContext

Entry = tuple[int, int, int] | tuple[int, int, int, float]
"""Step, S and d; or with the share of the blocks that the device is to own from there on."""


@contextmanager
def scripted(script: Sequence[Entry]) -> Iterator[list[tuple[int, UpdateSchedule]]]:
    """The training inside changes to each schedule after its step, in ascending order, whatever is measured; changes are appended to the
    list: (step after which it changed, to what).
    """
    left, changes = list(script), list[tuple[int, UpdateSchedule]]()

    def end_step(control: ScheduleControl, context: StepContext) -> str | None:
        if not left or context.number < left[0][0]:
            return None
        _, update_interval, publish_lag, *share = left.pop(0)
        policy = control.policy
        before = policy.schedule
        policy.schedule = UpdateSchedule(update_interval=update_interval, publish_lag=publish_lag)
        policy.resident_share = share[0] if share else policy.resident_share
        changes.append((context.number, policy.schedule))
        return "the script says so" if share or policy.schedule != before else None

    with mock.patch.object(ScheduleControl, "end_step", end_step):
        yield changes
