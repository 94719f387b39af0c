"""Schedules that `auto` may choose where memory is short."""

from collections.abc import Callable, Sequence

import pytest

from lightning_zenflow.schedule.candidates import candidates_of, that_fit
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule

CANDIDATES = candidates_of([1, 2, 4, 8], [0, 1, 2])
N_BLOCKS = 16


def slots(n: int) -> Callable[[Sequence[UpdateSchedule]], bool]:
    """Room for `n` gradient slots."""

    def fits(schedules: Sequence[UpdateSchedule]) -> bool:
        staggered = (StaggeredSchedule.of(s, n_blocks=N_BLOCKS, in_backward=True) for s in schedules)
        return max(s.n_slots for s in staggered) <= n

    return fits


def pairs(schedules: Sequence[UpdateSchedule]) -> list[tuple[int, int]]:
    return [(s.update_interval, s.publish_lag) for s in schedules]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1000, pairs(CANDIDATES)),
        (19, []),
        (20, [(1, 0)]),
        (32, [(1, 0), (2, 0)]),
        # Not S = 4, d = 0: a change from it to d = 1 would need the slots of S = 4, d = 1.
        (44, [(1, 0), (2, 0), (1, 1), (2, 1)]),
    ],
)
def test_the_less_stale_ones_are_kept(n: int, expected: list[tuple[int, int]]) -> None:
    kept = that_fit(CANDIDATES, slots(n))
    assert pairs(kept) == expected
    changes = candidates_of([c.update_interval for c in kept], [c.publish_lag for c in kept])
    assert not kept or slots(n)(changes), "there is room for windows of one while another begins"
