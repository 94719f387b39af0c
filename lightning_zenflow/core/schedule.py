"""Staggered update schedule: the steps at which windows close and update jobs are published, the memory for them, and the compensation of
the staleness that remains. Pure Python.

Steps count from 1. Blocks have phases 0..S-1 (S = update_interval), and each step closes the windows of one phase. A job submitted at the
end of step t is published before step t + 1 + d (d = publish_lag). docs/how_it_works.md, "Staggered windows and replay", says why.

Compensation moves weights beyond the exact ones, so that a forward pass sees nearly AdamW's (docs/decisions.md has the reasons).
A window that closes with step t is published d steps later. The forward passes of steps t + d + 1 to t + d + S see its weights: the exact
weights w and momentum m of step t. At these passes n = d, ..., d + S - 1 newer gradients g_1, ..., g_n exist, and AdamW would have

    w - lr / (sqrt(v) + eps) * (A_n * m + B_(n,1) * g_1 + ... + B_(n,n) * g_n)
    A_n = beta1 + beta1^2 + ... + beta1^n,        B_(n,i) = 1 - beta1^(n - i + 1)

up to the bias corrections and the change of v. Weight prediction adds one multiple of m when the weights are published, a provisional
update one multiple of each gradient when it arrives, for all passes after it. The multiples are the means of A_n and B_(n,i) over these
passes, which minimise the mean square distance from AdamW.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, total_ordering
from statistics import fmean
from typing import Literal


@total_ordering
@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """S and d; ordered by staleness: by the mean number of gradients that forward passes lack, d + (S - 1) / 2, then by the largest."""

    update_interval: int
    """S, in steps."""
    publish_lag: int
    """d, in steps: 0 or 1. A larger one hides no more work, and a longer window absorbs jitter as well."""

    def __lt__(self, other: "UpdateSchedule") -> bool:
        return self._staleness < other._staleness

    @property
    def _staleness(self) -> tuple[int, int]:
        return self.update_interval - 1 + 2 * self.publish_lag, self.update_interval

    @cached_property
    def is_immediate(self) -> bool:
        """True if every step ends with weights that have all of its gradients: S = 1, d = 0."""
        return self.update_interval == 1 and self.publish_lag == 0

    @property
    def kept_share(self) -> float:
        """Gradients kept to be reapplied after a publish, in sizes of the model: those of the blocks with a job in flight."""
        return self.publish_lag / self.update_interval


_FEW_BLOCKS, _MANY_BLOCKS, _MOST_BLOCKS, _SMALL_BLOCK, _BLOCK = 8, 16, 64, 1 << 19, 1 << 22
"""Where each block is submitted in backward, the worker's time for the last one is not hidden, so there are many: 16, beyond that one for
2^22 elements, at most 64. A block takes the training thread 0.2 to 0.3 ms a step, and the worker 1.3 to 2 ms for 2^22 elements at 60 to 100
GB/s, for 2^19 no longer than the training thread: none is smaller, unless there are only 8."""


def blocks_wanted(
    update_intervals: Sequence[int], *, in_backward: bool, numel: int, awaited_singly: bool = False
) -> int:
    """Number of blocks of a partition of `numel` elements: at least the largest S, so that every step closes a window. With
    `awaited_singly`, in the next forward pass, smaller ones make the first wait shorter.
    """
    finer = 1 + awaited_singly
    fewest = min(max(numel // _SMALL_BLOCK, _FEW_BLOCKS), _MANY_BLOCKS)
    of_backward = min(max(-(-finer * numel // _BLOCK), fewest), finer * _MOST_BLOCKS) if in_backward else 1
    return max(*update_intervals, of_backward)


_JOBS_A_SLOT, _JOBS_A_BUFFER, _LEAST_AT_ONCE = 4, 8, 3
"""Where blocks are submitted in backward, one in `_JOBS_A_SLOT` of a step's jobs has slots at once, beside those that are held between
steps, and one in `_JOBS_A_BUFFER` a publish buffer; at least `_LEAST_AT_ONCE` jobs have both. A block takes its slot with its first
gradient, its buffer with the last."""

_BUCKETS = 32
"""Per step. Gradients leave the device bucket by bucket; with few buckets, copies that could hide behind backward wait for its end."""

SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 200_000_000
"""Elements. Below the smallest, calls cost more than copies; the largest is the default of Lightning's `DeepSpeedStrategy`."""


def bucket_size(numel: int) -> int:
    """Elements per bucket of reduced gradients, for a model with `numel` trained parameters."""
    return min(max(-(-numel // _BUCKETS), SMALLEST_BUCKET), LARGEST_BUCKET)


@dataclass(frozen=True, kw_only=True)
class StaggeredSchedule(UpdateSchedule):
    """Closing and publish steps of all blocks, and the memory that they need."""

    n_blocks: int
    in_backward: bool = False
    """Blocks are submitted in backward where d = 0. Slots and publish buffers are then freed block by block."""
    in_place: bool = False
    """The publish buffers are the weights: one for each block."""

    def closing_blocks(self, step: int) -> range:
        """Blocks whose window closes at the end of `step`."""
        return range(step % self.update_interval, self.n_blocks, self.update_interval)

    @property
    def n_slots(self) -> int:
        """Largest number of gradient slots in use, each for one block and step.

        Of S blocks with different phases, the open windows hold at most 1 + 2 + ... + S slots, and d jobs of at most S slots each are
        in flight while the next step's gradients arrive. Where blocks are submitted in backward with d = 0, windows of 1, 2, ... S slots
        are open between steps, and jobs that find no slot beside these wait (`JobQueue.acquire`).
        """
        s = self.update_interval
        return self._n_closing * s * (s + 1) // 2 + s * self._jobs(self.publish_lag, _JOBS_A_SLOT)

    @property
    def n_publish_buffers(self) -> int:
        """Largest number of publish buffers in use by staggered steps: the jobs of d + 1 steps; in backward a buffer is used again as soon
        as its weights are on their way up. One more is for jobs whose weights are not copied to the model.
        """
        n_shown = self.n_blocks if self.in_place else self._jobs(self.publish_lag + 1, _JOBS_A_BUFFER)
        return n_shown + (self.in_backward and self.n_blocks > 0)

    @property
    def n_step_records(self) -> int:
        """Number of step records to keep: a job reaches back S + 1 steps, and its block may close up to S steps later."""
        return 2 * self.update_interval + 4

    @property
    def _n_closing(self) -> int:
        """Windows that close in a step, at most."""
        return -(-self.n_blocks // self.update_interval)

    def _jobs(self, n_steps: int, share: int) -> int:
        """Jobs of some steps; in backward one in `share` of those that a step submits."""
        if self.in_backward and self.publish_lag == 0:
            return min(self._n_closing, max(_LEAST_AT_ONCE, -(-self._n_closing // share)))
        return n_steps * self._n_closing


def candidates_of(update_intervals: Sequence[int], publish_lags: Sequence[int]) -> list[UpdateSchedule]:
    """All combinations of S and d, the least stale first."""
    return sorted(UpdateSchedule(update_interval=s, publish_lag=d) for s in update_intervals for d in publish_lags)


def with_changes(schedules: Sequence[UpdateSchedule]) -> list[UpdateSchedule]:
    """The schedules, and the one whose slots a change between any two of them may need: with the longest S, whose windows may still be
    open, and the largest d, whose jobs may be in flight.
    """
    longest = max(s.update_interval for s in schedules)
    return [UpdateSchedule(update_interval=longest, publish_lag=max(s.publish_lag for s in schedules)), *schedules]


def that_fit(
    candidates: Sequence[UpdateSchedule], fits: Callable[[Sequence[UpdateSchedule]], bool]
) -> list[UpdateSchedule]:
    """Candidates, the least stale first, between which a run may change without running out of memory. `fits` is true of fewer schedules
    whenever it is true of more.
    """
    kept: list[UpdateSchedule] = []
    for candidate in candidates:
        if fits([*kept, candidate]):
            kept.append(candidate)
    return kept


_FACTORED_CORRECTION = 2.0
"""Corrects for the factored second moment (`lightning_zenflow.kernels.base`): where few entries hold most of a matrix's gradient, it
exceeds the true second moment of most entries, and provisional updates are too small. Measured, see docs/decisions.md."""


def momentum_steps(schedule: UpdateSchedule, beta1: float) -> float:
    """Mean of A_n, in steps along the momentum, whose decay `beta1` is below 1."""
    s, d = schedule.update_interval, schedule.publish_lag
    return beta1 / (1 - beta1) * fmean(1 - beta1**n for n in range(d, d + s))


@lru_cache
def gradient_steps(schedule: UpdateSchedule, beta1: float, age: int) -> float:
    """Mean of B_(n,i), relative to a whole AdamW step along the gradient; i is `age`, from 1. An i that no regular pass sees (after a
    change of schedule, or before the first publish) counts as the largest one.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    i = min(age, d + s - 1)
    return fmean(1 - beta1 ** (n - i + 1) for n in range(max(i, d), d + s)) if i > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class StalenessCompensation:
    """Multiples of momentum and gradients for the configured `weight_prediction` and `provisional_scale`."""

    weight_prediction: float | Literal["auto"]
    provisional_scale: float | Literal["auto"]

    @property
    def updates_provisionally(self) -> bool:
        """True if weights get provisional updates."""
        return self.provisional_scale != 0.0

    def prediction_steps(self, schedule: UpdateSchedule, beta1: float) -> float:
        """Steps along the momentum that are added to published weights."""
        return momentum_steps(schedule, beta1) if self.weight_prediction == "auto" else self.weight_prediction

    def scale(self, schedule: UpdateSchedule, beta1: float, age: int) -> float:
        """Size of the provisional update relative to the learning rate, for the `age`-th gradient since the exact weights."""
        if self.provisional_scale != "auto":
            return self.provisional_scale
        return _FACTORED_CORRECTION * gradient_steps(schedule, beta1, age)
