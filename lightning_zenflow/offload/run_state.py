"""Components of an optimizer step, their counters, and the state of a run besides AdamW's, with which it continues bit for bit.

Layout 5, of plain numbers, lists and CPU tensors::

    version: 5
    layout
        config          keys that change numbers, with their values
        world_size
        slices          [(begin, start, numel, columns)] of `Partition.slices`
        block_length    of the `Partition`, where its blocks have one length
    step, skipped       steps done, and how many of them were not finite
    trained             [parameter] whether it was trained, not frozen, in the last step
    ownership
        selections      {number: [slice] columns, None for all}
        of_block        [block] number of the selection that it has, None before the first one
        wanted          [block] number of the selection that it has, or changes to with its next window
    planner
        synchronous_until, changing_until, single_backward
        selector        owned (positions of selected columns, None before the first selection), next, epoch
        schedule        None for fixed S and d; else update_interval, publish_lag
    provisional         None if weights have no provisional updates; else
        second_moments  [slice] tensors of the factored second moment, None for slices without, or that were never late
        clip            clip coefficient of the last applied step, NaN before the first
        noise           state of the noise generator
    in_backward         None, or what the next step's gradient norm is predicted from: ratio, last
    clipped             applied steps up to the last that were clipped in a row, as far as `Verification` needs them
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import DeviceNumber, runtime_of
from lightning_zenflow.offload.fill import Fill
from lightning_zenflow.offload.in_backward import BackwardSubmission
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.ownership import Freezing, Ownership, Selector
from lightning_zenflow.offload.plan import Planner
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.telemetry import Reading
from lightning_zenflow.worker.supervisor import SupervisedWorker

CHECKPOINT_KEY = "zenflow"
"""In DeepSpeed's optimizer state of a rank; DeepSpeed itself reads the keys it knows only."""

VERSION = 5
"""Number of the layout; a checkpoint of another one is refused."""


class CounterReader:
    """Reads the counters without waiting for the device: device values are copied asynchronously and read at a later call.

    Attributes:
        owned_norm_share: share of the squared norm of the gradient that lies in device-owned columns, copied where it is measured.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, in_backward: BackwardSubmission, ownership: Ownership) -> None:
        self._rank = rank
        self._numel = sum(s.numel for s in rank.partition.slices)
        self._jobs = jobs
        self._in_backward = in_backward
        self._ownership = ownership
        self.owned_norm_share = DeviceNumber()

    def read(self) -> Reading:
        """Present values; those of the device are from an earlier step."""
        runtime, telemetry = runtime_of(self._rank.device), self._rank.telemetry
        jobs, schedule = self._jobs.in_flight, self._jobs.schedule
        return Reading(
            steps=telemetry.steps,
            host_stall_s=telemetry.seconds,
            device_stall_s=telemetry.device_seconds,
            worker_busy_s=telemetry.worker_busy_s,
            worker_restarts=telemetry.worker_restarts,
            skipped_steps=telemetry.read_skipped(),
            d2h_bytes=telemetry.d2h_bytes,
            h2d_bytes=telemetry.h2d_bytes,
            model_bytes=max(1, self._numel * self._rank.dtype.itemsize),
            in_backward_jobs=jobs.n_in_backward,
            late_jobs=jobs.n_late,
            factor_error=self._in_backward.factor_error.read(),
            steps_in_backward=self._jobs.n_steps_in_backward,
            corrected_steps=self._jobs.verification.n_corrected,
            update_interval=schedule.update_interval,
            publish_lag=schedule.publish_lag,
            owned_share=self._ownership.numel / self._numel if self._numel else 0.0,
            owned_norm_share=self.owned_norm_share.read() if self._ownership.numel else None,
            arena_bytes=self._rank.arena.reserved_bytes,
            device_peak_bytes=runtime.max_memory_allocated(),
        )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of the step of one rank, built together; each is documented where it is defined."""

    rank: RankState
    worker: SupervisedWorker
    jobs: JobQueue
    ownership: Ownership
    provisional: ProvisionalUpdate
    fill: Fill
    selector: Selector
    planner: Planner
    counters: CounterReader
    write_count: Callable[[int], None]
    """Writes the number of applied steps to the user's optimizer, as checkpoints hold it."""


class RunState:
    """State of a run besides AdamW's, but for the number and the count of its steps; right after a flush only.

    Args:
        config: keys that change numbers are part of the layout.
        parts: components whose state it is.
        freezing: parameters that are trained.
        world_size: number of ranks.

    Attributes:
        layout: what must be the same for a run to continue this one bit for bit.
    """

    def __init__(self, config: ZenFlowConfig, parts: StepParts, freezing: Freezing, *, world_size: int) -> None:
        self._parts, self._freezing = parts, freezing
        partition = parts.rank.partition
        self.layout: dict[str, Any] = {
            "config": config.numeric_values(),
            "world_size": world_size,
            "slices": [(s.begin, s.start, s.numel, s.columns) for s in partition.slices],
            **({} if partition.block_length is None else {"block_length": partition.block_length}),
        }

    def state_dict(self, step: int) -> dict[str, Any]:
        """The state after a step."""
        parts = self._parts
        return {
            "version": VERSION,
            "layout": self.layout,
            "step": step,
            "skipped": int(parts.rank.telemetry.skipped),
            "trained": self._freezing.trained,
            "ownership": parts.ownership.state_dict(),
            "planner": parts.planner.state_dict(),
            "provisional": parts.provisional.state_dict(),
            "in_backward": parts.fill.norms.state_dict(),
            "clipped": parts.jobs.verification.n_clipped,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the components; the trained parameters must be those of the save."""
        parts = self._parts
        parts.planner.load_state_dict(saved["planner"])
        parts.ownership.load_state_dict(saved["ownership"])
        parts.provisional.load_state_dict(saved["provisional"])
        parts.fill.norms.load_state_dict(saved["in_backward"])
        # Earlier checkpoints do not say.
        parts.jobs.verification.n_clipped = saved.get("clipped", parts.jobs.verification.n_clipped)

    def difference_of(self, saved: Mapping[str, Any]) -> str:
        """Reason why this run cannot continue one with another `layout` or other blocks bit for bit; empty if it can."""
        layout, n_blocks = saved["layout"], len(saved["ownership"]["of_block"])
        if layout["world_size"] != self.layout["world_size"]:
            return f"it was saved by {layout['world_size']} ranks, these are {self.layout['world_size']}"
        theirs, ours = layout["config"], self.layout["config"]
        for key in {**ours, **theirs}:
            if key not in ours:
                return f"it was saved with {key}={theirs[key]!r}, a key that no longer exists"
            if theirs.get(key) != ours[key]:
                return f"it was saved with {key}={theirs.get(key)!r}, now it is {ours[key]!r}"
        is_same = layout == self.layout and n_blocks == len(self._parts.rank.blocks)
        return "" if is_same else "its partition is another"
