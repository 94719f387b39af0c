"""Schedules that `auto` may choose: those of the configured S and d that the host has memory for. Pure functions."""

from collections.abc import Callable, Sequence

from lightning_zenflow.schedule.staggered import UpdateSchedule

Fits = Callable[[Sequence[UpdateSchedule]], bool]
"""Whether there is memory for a run that uses all of these schedules; of fewer schedules, whenever it is true of more."""


def candidates_of(update_intervals: Sequence[int], publish_lags: Sequence[int]) -> list[UpdateSchedule]:
    """All combinations of S and d, the least stale first."""
    return sorted(UpdateSchedule(update_interval=s, publish_lag=d) for s in update_intervals for d in publish_lags)


def with_changes(schedules: Sequence[UpdateSchedule]) -> list[UpdateSchedule]:
    """The schedules, and the one whose slots a change between any two of them may need.

    Windows of the longest S may still be open, and jobs of the largest d in flight, while another schedule begins (`JobQueue`).
    """
    longest = max(s.update_interval for s in schedules)
    return [UpdateSchedule(update_interval=longest, publish_lag=max(s.publish_lag for s in schedules)), *schedules]


def that_fit(candidates: Sequence[UpdateSchedule], fits: Fits) -> list[UpdateSchedule]:
    """Candidates between which a run may change without running out of memory; the less stale ones are preferred.

    Args:
        candidates: S and d, the least stale first.
        fits: of schedules, and of the changes between them (`with_changes`).

    Returns:
        Some of the candidates, in their order. With one of them, all with a smaller S and the same d that were candidates are in it.
    """
    kept: list[UpdateSchedule] = []
    for candidate in candidates:
        if fits(with_changes([*kept, candidate])):
            kept.append(candidate)
    return kept
