"""When windows close and jobs are due: functions of the step number alone, so that runs repeat bit for bit.

Steps count from 1. The *window* of a block is the run of steps whose gradients are kept until they are replayed together. Blocks have
phases 0..S-1 (S = update_interval), and each step closes the windows of one phase: every step moves the same bytes and gives the
CPU the same work. A *round* is a closed window on its way through the worker. Handed over at the end of step t, it is published
before step t + 1 + d (d = publish_lag), ready or not: waiting for it is the stall that is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self


@dataclass(frozen=True, kw_only=True, order=True)
class UpdateSchedule:
    """A schedule's two numbers; ordered by staleness."""

    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps."""


_EARLY_BLOCKS = 16
"""Blocks at least where they are handed over one by one in backward: what the last of them needs is not hidden."""


def blocks_wanted(update_intervals: Sequence[int], *, early: bool) -> int:
    """Into how many blocks a partition is cut: as many as the largest S, so that each step has one to close.

    Args:
        update_intervals: S that may be used.
        early: whether blocks may be handed over in backward.
    """
    return max(*update_intervals, _EARLY_BLOCKS if early else 1)


@dataclass(frozen=True, kw_only=True)
class StaggeredSchedule:
    """The staggered schedule of one run."""

    n_blocks: int
    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps."""

    @classmethod
    def of(cls, schedule: UpdateSchedule, *, n_blocks: int) -> Self:
        """The staggered schedule of given S and d."""
        return cls(n_blocks=n_blocks, update_interval=schedule.update_interval, publish_lag=schedule.publish_lag)

    def closing_blocks(self, step: int) -> range:
        """Blocks whose window closes at the end of `step`."""
        return range(step % self.update_interval, self.n_blocks, self.update_interval)

    def publish_step(self, step: int) -> int:
        """The step at whose end a round handed over at the end of `step` is published."""
        return step + self.publish_lag

    @property
    def n_slots(self) -> int:
        """Gradient slots (one block, one step) in use at most.

        Of the S blocks that have different phases, the open windows hold at most 1 + 2 + ... + S slots, and d jobs of at most S
        slots are in flight while the next step's gradients arrive. The first windows after all were closed at once are
        shorter, never longer.
        """
        s = self.update_interval
        return -(-self.n_blocks // s) * (s * (s + 1) // 2 + s * self.publish_lag)

    @property
    def n_publish_buffers(self) -> int:
        """Publish buffers in use at most, once the schedule is staggered: the jobs of d + 1 steps."""
        return -(-self.n_blocks // self.update_interval) * (self.publish_lag + 1)

    @property
    def n_step_records(self) -> int:
        """Step records that must be kept: a round reaches back S steps, and as many may pass before any block closes."""
        return 2 * self.update_interval + self.publish_lag + 2
