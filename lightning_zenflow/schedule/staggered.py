"""Staggered update schedule: the steps at which windows close and update jobs are published. Pure functions of the step number.

Steps count from 1. The *window* of a block holds the gradients of consecutive steps until the worker replays them together. Blocks have
phases 0..S-1 (S = update_interval). Each step closes the windows of one phase, so that all steps copy the same number of bytes and
give the worker the same work. A closed window becomes an *update job*. A job submitted at the end of step t is published before
step t + 1 + d (d = publish_lag). If the worker has not finished it by then, the trainer waits, and the wait counts as stall.
The step number alone determines all of this, so that runs repeat bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self


@dataclass(frozen=True, kw_only=True, order=True)
class UpdateSchedule:
    """S and d; ordered by staleness."""

    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps."""

    @property
    def kept_share(self) -> float:
        """Gradients kept to be reapplied after a publish, at the end of backward, in sizes of the model: d (d + 1) / (2 S) for d <= S.

        A block keeps all gradients since its oldest job in flight was submitted, 1 to d steps ago; jobs of a step are of 1/S of the blocks.
        """
        s, d = self.update_interval, self.publish_lag
        return sum(range(max(0, d - s) + 1, d + 1)) / s


_BLOCKS_IN_BACKWARD = 16
"""Least number of blocks where each is submitted in backward: the worker's time for the last one is not hidden."""


def blocks_wanted(update_intervals: Sequence[int], *, in_backward: bool) -> int:
    """Number of blocks to cut a partition into: at least the largest S, so that every step closes a window.

    Args:
        update_intervals: values of S that may be used.
        in_backward: whether blocks may be submitted in backward.
    """
    return max(*update_intervals, _BLOCKS_IN_BACKWARD if in_backward else 1)


_BUCKETS = 32
"""Per step. Gradients leave the device bucket by bucket; with few buckets, copies that could hide behind backward wait for its end."""

SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 200_000_000
"""Elements. Below the smallest, calls cost more than copies; the largest is the default of Lightning's `DeepSpeedStrategy`."""


def bucket_size(numel: int) -> int:
    """Elements per bucket of reduced gradients, for a model with `numel` trained parameters."""
    return min(max(-(-numel // _BUCKETS), SMALLEST_BUCKET), LARGEST_BUCKET)


@dataclass(frozen=True, kw_only=True)
class StaggeredSchedule:
    """Closing and publish steps of all blocks, and the memory that they need."""

    n_blocks: int
    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps."""
    in_backward: bool = False
    """Whether blocks are submitted in backward where d = 0: the last gradient of a window then keeps its slot until the next job commits
    it."""

    @classmethod
    def of(cls, schedule: UpdateSchedule, *, n_blocks: int, in_backward: bool = False) -> Self:
        """The staggered schedule of given S and d."""
        s, d = schedule.update_interval, schedule.publish_lag
        return cls(n_blocks=n_blocks, update_interval=s, publish_lag=d, in_backward=in_backward)

    def closing_blocks(self, step: int) -> range:
        """Blocks whose window closes at the end of `step`."""
        return range(step % self.update_interval, self.n_blocks, self.update_interval)

    def publish_step(self, step: int) -> int:
        """Step at whose end a job submitted at the end of `step` is published."""
        return step + self.publish_lag

    @property
    def n_slots(self) -> int:
        """Largest number of gradient slots in use; a slot holds the gradient of one block and step.

        Of S blocks with different phases, the open windows hold at most 1 + 2 + ... + S slots, and d jobs of at most S slots each are
        in flight while the next step's gradients arrive. Windows that follow a simultaneous close of all blocks are shorter. With
        submission in backward, each window begins with a gradient that the last job has shown, or, with a lag, the first windows after
        a change of the schedule do.
        """
        s, d = self.update_interval, self.publish_lag
        shown = 0 if not self.in_backward else s if d == 0 else 1
        return -(-self.n_blocks // s) * (s * (s + 1) // 2 + s * d + shown)

    @property
    def n_publish_buffers(self) -> int:
        """Largest number of publish buffers in use by staggered steps: the jobs of d + 1 steps."""
        return -(-self.n_blocks // self.update_interval) * (self.publish_lag + 1)

    @property
    def n_step_records(self) -> int:
        """Number of step records to keep: a job reaches back S + 1 steps, and its block may close up to S steps later."""
        return 2 * self.update_interval + self.publish_lag + 3
