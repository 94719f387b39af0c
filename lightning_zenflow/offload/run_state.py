"""AdamW's state in the arena, as the user's optimizer has it; the components of an optimizer step, with their counters; and the state of a
run besides AdamW's, with which it continues bit for bit.

Layout 5, of plain numbers, lists and CPU tensors::

    version: 5
    layout
        config          keys that change numbers, with their values
        world_size
        slices          [(begin, start, numel, columns)] of `Partition.slices`
        block_length    of the `Partition`, where its blocks have one length
    step, skipped       steps done, and how many of them were not finite
    single_backward     see `ZenFlowStep.has_single_backward`; earlier versions have it in the planner's
    trained             [parameter] whether it was trained, not frozen, in the last step
    counts              {name of a parameter: applied steps in which it was trained}
    ownership
        selections      {number: [slice] columns, None for all}
        of_block        [block] number of the selection, None before the first one
        wanted          the same; in checkpoints of earlier versions, what blocks changed to with their next windows
    planner
        synchronous_until
        selector        owned (positions of selected columns, None before the first selection), next, epoch
        schedule        None for fixed S and d; else update_interval, publish_lag
    provisional         None if weights have no provisional updates; else
        second_moments  [slice] tensors of the factored second moment, None for slices without, or that were never late
        clip            clip coefficient of the last applied step, NaN before the first
        noise           state of the noise generator
    in_backward         None, or what the next step's factor is predicted from: ratio, last; limit, scale, as far as they are learned
    clipped             applied steps up to the last that were clipped in a row, as far as `Verification` needs them
    residents           with `offload_ratio: auto`: n_blocks that the device owned, and the transient bytes of a step beside them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.saved_tensors import saved_as_float32
from lightning_zenflow.offload.columns import Ownership, Selector
from lightning_zenflow.offload.fill import Fill
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.owner_moves import OwnerMoves
from lightning_zenflow.offload.plan import Planner
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.resident import Residents
from lightning_zenflow.telemetry import Reading
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.moments import Moment

CHECKPOINT_KEY = "zenflow"
"""In DeepSpeed's optimizer state of a rank; DeepSpeed itself reads the keys it knows only."""

VERSION = 5
"""Number of the layout; a checkpoint of another one is refused."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""


class HostState:
    """Replaces DeepSpeed's flat fp32 partitions, the parameters of the user's `optimizer`, and its moments by views of the arena, so that
    DeepSpeed's checkpoint code reads and writes the arena. The values of `flats`, of any type and on any device, are copied into it.

    Every reader of a checkpoint gets the moments as float32: with 16 bits the file has those of the arena and the call of `Tensor.float`.
    With moments in 8 bits, which DeepSpeed's code cannot read, the optimizer's state has NaN of the right length in their place.
    `states` has the moments by key, and master weights (None), of the whole partition.
    """

    def __init__(self, optimizer: Optimizer, flats: Sequence[Tensor], *, partition: Partition, arena: Arena) -> None:
        self._optimizer, self._flats, self._begins = optimizer, list(flats), partition.group_begins
        self.states: dict[str | None, Moment] = dict(zip((None, *MOMENTS), arena.states, strict=True))
        for flat, begin in zip(self._flats, self._begins, strict=True):
            numel = flat.numel()
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`. Gradients are in the slots, so a single expanded zero is enough.
            flat.grad = master.new_zeros(1).expand(numel)
            optimizer.state[flat] = {name: self.states[name].stand_in(begin, numel) for name in MOMENTS}
        self.write_count(0)

    def write_count(self, count: int) -> None:
        """Writes the number of applied steps as AdamW's `step`, in the form that the optimizer has in checkpoints."""
        is_tensor = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        for flat in self._flats:
            self._optimizer.state[flat]["step"] = (
                torch.tensor(float(count), dtype=torch.float32, device="cpu") if is_tensor else count
            )

    def clear(self) -> None:
        """Removes weights and state from the user's optimizer, before their memory is released."""
        for flat in self._flats:
            flat.grad = None
            flat.data = flat.data.new_empty(0)
            self._optimizer.state.pop(flat, None)

    def as_saved(self, state: Mapping[str, Any], copied: Sequence[Sequence[Tensor]] | None) -> dict[str, Any]:
        """The `state_dict` of the user's optimizer, as a checkpoint holds it. `copied` has for each flat partition copies, the moments
        last; None: the arena's memory is shared.
        """
        moments = copied or [
            [saved_as_float32(self.states[name].read(begin, flat.numel())) for name in MOMENTS]
            for flat, begin in zip(self._flats, self._begins, strict=True)
        ]
        of_keys = {
            key: {**before, **dict(zip(MOMENTS, of_partition[-len(MOMENTS) :], strict=True))}
            for (key, before), of_partition in zip(state["state"].items(), moments, strict=True)
        }
        return {**state, "state": of_keys}

    def load(self, partitions: Sequence[Sequence[Tensor]], *, moments: bool) -> None:
        """Copies for each flat partition master weights, perhaps without padding, and, with `moments`, moments of any type into the arena;
        fewer bits are rounded to nearest.
        """
        for flat, begin, (master, *of_names) in zip(self._flats, self._begins, partitions, strict=True):
            flat.data.narrow(0, 0, master.numel()).copy_(master.detach())
            for name, values in reversed([*zip(MOMENTS, of_names, strict=True)] if moments else []):
                self.states[name].write(begin, values)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parameters are trained between two changes of that, in the order of `Slice.parameter`. As under plain torch, a frozen parameter
    and its moments do not change, and AdamW's step count is each parameter's own.
    """

    parameters: Mapping[str, Tensor]
    """Those that required gradients at setup, by name."""
    flags: list[bool]
    """Whether it is trained: its `requires_grad`, alike on every rank."""
    since: int
    """Applied steps of the run before."""
    counts: list[int]
    """Those in which it was trained."""

    @property
    def n_missed(self) -> list[int | None]:
        """Applied steps of the run that AdamW's own count lacks; None of a frozen parameter, whose count stands still."""
        return [self.since - n if is_trained else None for is_trained, n in zip(self.flags, self.counts, strict=True)]

    def counts_at(self, count: int) -> dict[str, int]:
        """AdamW's own count of each parameter by name, after `count` applied steps of the run."""
        own = (n + is_trained * (count - self.since) for is_trained, n in zip(self.flags, self.counts, strict=True))
        return dict(zip(self.parameters, own, strict=True))

    def changed(self, flags: list[bool], counts: Mapping[str, int] | None, count: int) -> "Trained":
        """What is trained from `count` applied steps on. `counts`: as of `counts_at`, `count` where missing; None: of this run."""
        own = self.counts_at(count) if counts is None else counts
        return replace(self, flags=flags, since=count, counts=[own.get(name, count) for name in self.parameters])


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of the step of one rank."""

    rank: RankState
    jobs: JobQueue
    ownership: Ownership
    residents: Residents
    moves: OwnerMoves
    provisional: ProvisionalUpdate | None
    """None where no weight is ever late, or none is updated provisionally."""
    fill: Fill
    selector: Selector
    planner: Planner
    host_state: HostState

    def read_counters(self) -> Reading:
        """Present values of all counters; those of the device are from an earlier step."""
        telemetry, jobs, rank = self.rank.telemetry, self.jobs, self.rank
        is_movable = runtime_of(rank.device).runs_behind and not rank.in_place
        return replace(
            telemetry.counts,
            device_stall_s=telemetry.device_seconds,
            skipped_steps=telemetry.read_skipped(),
            factor_error=self.fill.factor_error.read(),
            update_interval=jobs.schedule.update_interval,
            publish_lag=jobs.schedule.publish_lag,
            owned_norm_share=self.selector.owned_norm_share.read() if self.ownership.selections else None,
            resident_share=len(self.residents.blocks) / len(rank.blocks) if self.residents.blocks else None,
            movable_bytes=is_movable * sum(self.residents.sizes),
        )

    def state_dict(self) -> dict[str, Any]:
        """Their state; right after a flush only."""
        return {
            "ownership": self.ownership.state_dict(),
            "planner": self.planner.state_dict(),
            "provisional": None if self.provisional is None else self.provisional.state_dict(),
            "in_backward": self.fill.norms.state_dict(),
            "clipped": self.jobs.verification.n_clipped,
            **({"residents": state} if (state := self.moves.state_dict()) else {}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the trained parameters must be those of the save."""
        self.planner.load_state_dict(saved["planner"])
        self.ownership.load_state_dict(saved["ownership"])
        if self.provisional is not None:
            self.provisional.load_state_dict(saved["provisional"])
        self.fill.norms.load_state_dict(saved["in_backward"])
        # Earlier checkpoints do not say.
        self.jobs.verification.n_clipped = saved.get("clipped", self.jobs.verification.n_clipped)


def layout_of(config: ZenFlowConfig, partition: Partition, *, world_size: int) -> dict[str, Any]:
    """What must be the same for a run to continue another one bit for bit."""
    return {
        "config": config.numeric_values(),
        "world_size": world_size,
        "slices": [(s.begin, s.start, s.numel, s.columns) for s in partition.slices],
        **({} if partition.block_length is None else {"block_length": partition.block_length}),
    }


def difference_of(saved: Mapping[str, Any], present: Mapping[str, Any], n_blocks: int) -> str:
    """Reason why a run with the `present` layout and number of blocks cannot continue a saved one bit for bit; empty if it can."""
    layout = saved["layout"]
    if layout["world_size"] != present["world_size"]:
        return f"it was saved by {layout['world_size']} ranks, these are {present['world_size']}"
    ours = present["config"]
    # Earlier checkpoints have no such key: the host owned all blocks.
    before = ours["offload_ratio"] if ours["offload_ratio"] in ("auto", 1.0) else 1.0
    theirs = {"offload_ratio": before, **layout["config"]}
    for key in {**ours, **theirs}:
        if key not in ours:
            return f"it was saved with {key}={theirs[key]!r}, a key that no longer exists"
        if theirs.get(key) != ours[key]:
            return f"it was saved with {key}={theirs.get(key)!r}, now it is {ours[key]!r}"
    is_same = layout == present and len(saved["ownership"]["of_block"]) == n_blocks
    return "" if is_same else "its partition is another"
