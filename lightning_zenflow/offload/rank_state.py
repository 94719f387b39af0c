"""Objects of one rank that every part of an optimizer step works on: its blocks, with their windows and jobs, the slots of their gradients,
and the inputs of the open step.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.device import Event, SideStream
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.schedule import StaggeredSchedule
from lightning_zenflow.core.step_inputs import GivenFactor, GroupHyperparameters
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.native import Tentative
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.process import Submission, SupervisedWorker

if TYPE_CHECKING:
    from lightning_zenflow.offload.columns import ColumnSquaredNorms
    from lightning_zenflow.offload.resident import ResidentBlock

_MAX_VIEWS = 1 << 16
"""Of tiles in slots that are kept, some 50 MB: long windows of large models have more of them."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the optimizer around a step decides."""

    groups: Sequence[GroupHyperparameters]
    """Hyperparameters of each parameter group."""
    loss_scale: float
    """Factor that the loss is multiplied by before backward."""
    max_norm: float
    """Largest norm of the whole gradient after clipping; 0: no clipping. Infinity: that of the user's code, in `factor`."""
    factor: GivenFactor | None = None
    """Factor that the user's code has put on all gradients; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One optimizer step, passed along with its gradients; its kind is the same on every rank."""

    number: int
    """Counted from 1."""
    inputs: StepInputs
    """Read as backward begins; `ZenFlowStep.step` reads hyperparameters and largest norm again."""
    schedule: StaggeredSchedule
    synchronous: bool
    """Every window closes and is published in the step itself, exactly."""
    submits_in_backward: bool
    """Blocks whose window closes are submitted as soon as their gradient is complete."""
    column_norms: "ColumnSquaredNorms | None"
    """Sums that decide on new columns, in synchronous steps only; None in steps that do not select."""
    releases: bool
    """The device gives up its columns, because nothing is late any more; in synchronous steps only."""

    @property
    def shows_exact_weights(self) -> bool:
        """The step ends with weights that have all of its gradients."""
        return self.synchronous or self.schedule.is_immediate


@dataclass(kw_only=True)
class Window:
    """Open window of one block: a gradient slot for each step that is not committed to the block's state."""

    first_step: int
    slots: list[int] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Last step whose gradient the window holds; the one before `first_step` where it holds none."""
        return self.first_step + len(self.slots) - 1


@dataclass(kw_only=True, eq=False)
class Job:
    """A closed window on its way through the worker. Nothing but `JobsInFlight` changes it."""

    block: "Block"
    window: Window
    tentative: Tentative
    """Other than NONE, the window's last gradient is applied to the published weights only, and stays in the next window."""
    due_step: int
    """Step at whose end the weights are published."""
    buffer: int | None
    """Publish buffer; None: the weights are discarded."""
    submission: Submission
    """The job's message to the worker, and its answer."""
    holds_buffer: bool
    """Whether the buffer is still to be given back."""
    read: set[int]
    """Slices to publish that kernels of the due step may still read or update."""
    overwritable: list[tuple[Event, Set[int]]]
    """Slices to publish that may be overwritten once the event completes."""
    is_partly_published: bool = False
    """Whether copies of some of its weights into the model have been enqueued in backward."""


@dataclass(kw_only=True, eq=False)
class Block:
    """What is under way with one block. Slot, window and jobs are changed within `RankState.records`."""

    number: int
    """Index into `Partition.blocks`."""
    begin: int
    """First element in the partition."""
    tiles: Sequence[int]
    """Indexes into `Partition.tiles`."""
    slices: dict[int, tuple[int, int, int]]
    """For each slice that has tiles in the block its parameter group and, in the partition, its elements [begin, end)."""
    missing: set[int] = field(default_factory=set)
    """Trained slices whose gradient has not arrived in the open step."""
    slot: int | None = None
    """Slot of the gradient of the open or next step, once the block has acquired it."""
    window: Window | None = None
    """Its open window; None: every gradient has been submitted."""
    jobs: deque[Job] = field(default_factory=deque)
    """Jobs that are not published yet, in the order of their submission."""
    resident: "ResidentBlock | None" = None
    """Owner of its state, on the device: then it has no slot, window or job. None: the host is, in the arena. `Residents` changes it."""

    def fill(self, step: int) -> Window:
        """Adds the gradient of the open step, which is in the block's slot, to its window; returns the window."""
        assert self.slot is not None, "a slot is acquired before"
        if self.window is None:
            self.window = Window(first_step=step)
        self.window.slots.append(self.slot)
        return self.window

    @property
    def is_overwritten(self) -> bool:
        """Whether a job in flight will overwrite the block's weights; in backward, at the end of the step, without the step's gradient."""
        return any(job.buffer is not None for job in self.jobs)


class Blocks(list[Block]):
    """All blocks of a partition, by their numbers; by tile; and for each slice those that it has tiles in, ascending."""

    def __init__(self, partition: Partition) -> None:
        for number, block in enumerate(partition.blocks):
            slices: dict[int, tuple[int, int, int]] = {}
            for tile in (partition.tiles[index] for index in block.tiles):
                begin = slices[tile.slice][1] if tile.slice in slices else tile.begin
                slices[tile.slice] = partition.slices[tile.slice].param_group, begin, tile.end
            self.append(Block(number=number, begin=block.begin, tiles=block.tiles, slices=slices))
        self.of_tile = [block for block in self for _ in block.tiles]
        self.of_slice = [[block for block in self if index in block.slices] for index in range(len(partition.slices))]


class Transaction:
    """Context of a change of several records, in which nothing waits. A change that an exception cuts is broken until `repaired`.

    `KeyboardInterrupt` and the exceptions of other signal handlers may be raised between any two instructions. Outside of the context the
    records agree, whatever is raised there.
    """

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_broken(self) -> bool:
        """Whether an exception has cut a change; to be asked outside of the context."""
        return self._depth > 0

    def repaired(self) -> None:
        """Notes that the records agree again."""
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._depth -= 1


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The model's weights, the optimizer state and the tools of one rank. Ownership of the memory behind `arena` is defined in
    ``protocol.h``; `weights` on the device are the training thread's, in the order of the streams.
    """

    partition: Partition
    blocks: Blocks
    """Of the partition, with all that is under way with them."""
    arena: Arena
    """Shared memory: exact state, gradient slots and publish buffers."""
    worker: SupervisedWorker
    weights: Sequence[Tensor]
    """For each parameter group the rank's flat partition of the model's weights, model dtype; on the device, or in place: views of
    `Arena.publish`, which `Arena.close` frees."""
    in_place: bool
    """Whether the weights are where the worker writes them: see `JobsInFlight`."""
    device: torch.device
    """Of gradients and of what is computed from them."""
    kernels: Kernels
    telemetry: Telemetry
    d2h: SideStream
    """Stream on which gradients, factors and sequence numbers are copied to the arena."""
    group: dist.ProcessGroup | None
    """Data-parallel ranks; None: this one alone."""
    trained: dict[int, int]
    """For each slice that is not frozen the applied steps of the run that AdamW's own count lacks; changed between steps."""
    records: Transaction = field(default_factory=Transaction)
    """Entered where records of slots, windows, jobs and publish buffers change together. If a change is cut, the exact state is lost."""

    @property
    def n_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and gradients."""
        return self.weights[0].dtype

    def forget_weights(self) -> None:
        """Drops the memory of the weights when training has ended; the model may have others by then."""
        for weights in self.weights:
            weights.data = weights.new_empty(0)

    def host_bytes(self, slice_index: int) -> int:
        """Bytes of a slice's gradient in blocks that the host owns."""
        hosted = (b.slices[slice_index] for b in self.blocks.of_slice[slice_index] if b.resident is None)
        return sum(end - begin for _, begin, end in hosted) * self.dtype.itemsize

    def masters_of(self, slice_index: int) -> Iterator[Tensor]:
        """Master weights of a slice in its owners' memory, as views whose concatenation is the slice's, float32."""
        for block in self.blocks.of_slice[slice_index]:
            _, begin, end = block.slices[slice_index]
            if block.resident is None:
                yield self.arena.master[begin:end]
            else:
                yield block.resident.state[0, begin - block.begin : end - block.begin]

    def weights_at(self, param_group: int, begin: int, numel: int) -> Tensor:
        """View [numel] of the model's weights, all of one parameter group; `begin` is counted over the partition."""
        return self.weights[param_group].narrow(0, begin - self.partition.group_begins[param_group], numel)


def runs_of(partition: Partition, tiles: Iterable[int]) -> dict[int, int]:
    """First tile of each run of tiles that are adjacent in one parameter group, and the elements of the run; `tiles` are ascending."""
    runs: dict[int, int] = {}
    first = group = end = -1
    for index in tiles:
        tile = partition.tiles[index]
        before, group = group, partition.slices[tile.slice].param_group
        if tile.begin != end or group != before:
            first = index
        runs[first] = runs.get(first, 0) + tile.numel
        end = tile.end
    return runs


class SlotPool:
    """Owner of the arena's gradient slots: host memory for one gradient of one block.

    The slots that a job commits are free when the worker's *done* has been read: what is copied to them afterwards comes after the worker
    has read them. The slot freed last is taken first, so that a schedule touches no more memory than it needs.

    Attributes:
        n_slots: slots in use at most.
        free: slots that can be acquired, the one freed last at the end; changed within `RankState.records`.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self.n_slots = 0
        self.free: list[int] = []
        self._views: dict[tuple[int, int], Tensor] = {}

    def grow(self, n_slots: int) -> None:
        """Allows the pool to use the first `n_slots` slots of the arena."""
        with self._rank.records:
            self.free[:0] = reversed(range(self.n_slots, n_slots))
            self.n_slots = max(self.n_slots, n_slots)

    def view(self, tile_index: int) -> Tensor:
        """Destination of a tile's gradient in the slot that its block has acquired: [rows, width], model dtype, host memory (page-locked
        for a CUDA device), or on the device where the block is resident; to be written in stream order.
        """
        # Views are cached: every step asks for as many as there are tiles, and a new one takes six times as long.
        block = self._rank.blocks.of_tile[tile_index]
        if block.resident is not None:
            return block.resident.slot(tile_index, self._rank.partition.tiles[tile_index])
        assert block.slot is not None, "`JobQueue.acquire` comes before"
        slot = block.slot
        view = self._views.get((tile_index, slot))
        if view is None:
            tile = self._rank.partition.tiles[tile_index]
            slots = self._rank.arena.slots
            first = slots.storage_offset() + slot * slots.stride(0) + tile.begin - block.begin
            view = slots.as_strided((tile.rows, tile.width), (tile.width, 1), first)
            if len(self._views) < _MAX_VIEWS:
                self._views[tile_index, slot] = view
        return view

    def views_of_slice(self, slice_index: int) -> list[tuple[int, Tensor]]:
        """Destinations of a slice's gradient: for each tile its first element in the slice, and its part of the slot, flat."""
        partition = self._rank.partition
        begin = partition.slices[slice_index].begin
        return [
            (partition.tiles[tile].begin - begin, self.view(tile).view(-1))
            for tile in partition.tiles_by_slice[slice_index]
        ]
