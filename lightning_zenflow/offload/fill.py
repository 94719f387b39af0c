"""Phase *fill*: a step's gradients on their way to the slots and to device-owned columns, before DeepSpeed reuses their buffer. Sums over
micro-batches; small vectors, which are handled together; complete blocks, which go to the worker in backward.
"""

import logging
from collections.abc import Iterable, Sequence, Set
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import DeviceNumber, runtime_of
from lightning_zenflow.core.partition import Tile, tiles_of_slice
from lightning_zenflow.core.step_inputs import GradientNorms, StepScale
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.offload.columns import Ownership
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Block, RankState, SlotPool, StepContext, runs_of

_log = logging.getLogger(__name__)

_LARGEST_NUMEL = 1 << 16
"""Elements of a slice that `VectorGradients` handles. Kept gradients take device memory, and larger ones are worth a pass of their own."""


class Accumulation:
    """Owner of the sums of gradients over the micro-batches of a step but the last, in device memory or in the step's slots. Sums are
    rounded to the model's type after each micro-batch: the same bits wherever they are. `where` is `ZenFlowConfig.accumulate_on`; "auto" is
    decided at the first micro-batch, when the device's memory has been as full as it gets.

    Attributes:
        pending: slices with a sum that has not been taken.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, *, where: Literal["auto", "device", "host"]) -> None:
        self._rank = rank
        self._jobs = jobs
        self._where = where
        self._on_device: Tensor | None = None  # [partition.numel], model dtype
        self.pending: set[int] = set()

    def add(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Adds a gradient of another micro-batch than the last, as `Fill.receive` takes it."""
        if slice_index not in self._rank.trained:
            return
        if self._where == "auto":
            n_bytes = self._rank.partition.numel * self._rank.dtype.itemsize
            self._where = "device" if runtime_of(self._rank.device).room() >= n_bytes else "host"
            _log.info("ZenFlow: accumulate_on='auto': gradients are accumulated on the %s", self._where)
        if self._where == "host":
            if slice_index in self.pending:
                gradient.add_(self.sum(slice_index))
            else:
                self._jobs.acquire(self._rank.blocks.of_slice[slice_index], step)
            for begin, slot in self._jobs.slots.views_of_slice(slice_index):
                slot.copy_(gradient.narrow(0, begin, slot.numel()), non_blocking=True)
            self._rank.telemetry.d2h_bytes += self._rank.host_bytes(slice_index)
        elif slice_index in self.pending:
            self.sum(slice_index).add_(gradient)
        else:
            self.sum(slice_index).copy_(gradient)
        self.pending.add(slice_index)

    def take(self, slice_index: int) -> Tensor:
        """A pending sum, which is no longer pending: [slice.numel], model dtype, on the device."""
        total = self.sum(slice_index)
        self.pending.remove(slice_index)
        return total

    def release(self) -> Tensor | None:
        """Frees the device memory of the sums where none is pending; where some are, returns it."""
        if not self.pending:
            self._on_device = None
        return self._on_device

    def sum(self, slice_index: int) -> Tensor:
        """A sum, [slice.numel], model dtype, on the device; not initialised before the first gradient."""
        rank, s = self._rank, self._rank.partition.slices[slice_index]
        if self._where == "device":
            if self._on_device is None:
                self._on_device = torch.empty(rank.partition.numel, dtype=rank.dtype, device=rank.device)
            return self._on_device.narrow(0, s.begin, s.numel)
        total = torch.empty(s.numel, dtype=rank.dtype, device=rank.device)
        for begin, slot in self._jobs.slots.views_of_slice(slice_index):
            total.narrow(0, begin, slot.numel()).copy_(slot, non_blocking=True)
        rank.telemetry.h2d_bytes += rank.host_bytes(slice_index)
        return total


class Vectors(NamedTuple):
    """Gradients of the small vectors of one block; all tensors are views of `values`, [n], contiguous."""

    values: Tensor
    tiles: list[tuple[int, Tensor]]
    """Indexes into `Partition.tiles`, with the gradients of the tiles, [rows, width]."""
    runs: list[tuple[int, Tensor]]
    """First tile of each run of tiles that are adjacent in the partition, with the gradients of the run, flat."""


class VectorGradients:
    """Owner of one step's gradients of small vectors, concatenated in one tensor on the device. All calls but one a gradient serve many
    vectors at once, at the end of backward or when their block is submitted.

    Attributes:
        of_slice: for each small vector's slice the step's gradient, once it is there: [slice.numel], model dtype, on the device.
    """

    def __init__(self, rank: RankState, slots: SlotPool, ownership: Ownership) -> None:
        self._rank = rank
        self._slots = slots
        self._ownership = ownership
        partition = rank.partition
        small = {i: s for i, s in enumerate(partition.slices) if not s.is_matrix and s.numel <= _LARGEST_NUMEL}
        numels = [s.numel for s in small.values()]
        self._values = torch.zeros(sum(numels), device=rank.device, dtype=rank.dtype)
        self.of_slice = dict(zip(small, torch.split(self._values, numels), strict=True))
        self._of_block: dict[Block, Vectors] = {}
        end = 0
        for block in rank.blocks:
            begin, tiles = end, []
            for index in (index for index in block.tiles if partition.tiles[index].slice in small):
                tile = partition.tiles[index]
                tiles.append((index, self._values.narrow(0, end, tile.numel).view(tile.rows, tile.width)))
                end += tile.numel
            values = self._values.narrow(0, begin, end - begin)
            runs = runs_of(partition, (index for index, _ in tiles))
            of_runs = zip(runs, torch.split(values, list(runs.values())), strict=True) if runs else ()
            self._of_block[block] = Vectors(values=values, tiles=tiles, runs=list(of_runs))
        assert end == self._values.numel(), "blocks and slices ascend alike"

    def fill(self, blocks: Sequence[Block], arrived: Set[int]) -> Sequence[Tensor]:
        """Phase *fill* of some blocks, ascending; slices that have not `arrived` have the gradient zero. Returns `SquaredNorms.parts`."""
        hosted = (self._of_block[block].values.nbytes for block in blocks if block.resident is None)
        self._rank.telemetry.d2h_bytes += sum(hosted)
        if len(blocks) == len(self._rank.blocks):
            return self._fill(blocks, self._values, arrived)
        return [norm for block in blocks for norm in self._fill([block], self._of_block[block].values, arrived)]

    def _fill(self, blocks: Sequence[Block], values: Tensor, arrived: Set[int]) -> Sequence[Tensor]:
        """Fills some blocks; `values` is the concatenation of theirs."""
        if not values.numel():
            return ()
        for index in {i for block in blocks for i in block.slices if i in self.of_slice and i not in arrived}:
            self.of_slice[index].zero_()
        of_blocks = [self._of_block[block] for block in blocks]
        # A copy to the host is a call of its own, so that neighbours are copied as one.
        runs = [run for vectors in of_blocks for run in vectors.runs]
        slots = [self._slots.view(first).as_strided((of_run.numel(),), (1,)) for first, of_run in runs]
        torch._foreach_copy_(slots, [of_run for _, of_run in runs], non_blocking=True)
        targets, sources = [], []
        for vectors in of_blocks:
            for tile, gradient in vectors.tiles:
                if (selection := self._ownership.selections.get(tile)) is not None:
                    targets.append(selection.entries)
                    sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        # In float64, so that the sum does not depend on which vectors are measured together.
        return [torch.linalg.vector_norm(values, dim=0, keepdim=True, dtype=torch.float64).square_()]


class Rectangle(NamedTuple):
    """A rectangle of a slice that squared norms are taken of, which must not depend on blocks."""

    whole: Tile
    parts: list[tuple[int, int]]
    """Tiles of the partition that block boundaries cut it into, each with its first element in the rectangle."""


class Fill:
    """Phase *fill*: all that is done when a gradient arrives.

    A trained slice is *pending* while its gradient is a sum over earlier micro-batches (`Accumulation.pending`); *arrived* from when the
    gradient of the whole step has been routed, which no block then misses (`Block.missing`); and besides *unpolled* until
    `JobsInFlight.poll` hears that its weights may be overwritten. A parameter without a gradient in a step has the gradient zero, as under
    ZeRO-2 without offload: its moments decay.

    *In backward* a block is submitted as soon as the gradients of all of its trained slices have arrived. With clipping its factor is
    *predicted* from the gradients so far (`GradientNorms`), or *speculated* to be that of a step without clipping (`Verification`). From
    the first gradient on that is not finite, submitted blocks are published without the step. (A vector's gradient counts when its block is
    submitted.)

    Attributes:
        factor_error: mean relative error of the factors in backward in some step since it was read.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        rank: RankState,
        jobs: JobQueue,
        ownership: Ownership,
        provisional: ProvisionalUpdate | None,
    ) -> None:
        self._rank = rank
        self._jobs = jobs
        self._ownership = ownership
        self._provisional = provisional
        self.accumulation = Accumulation(rank, jobs, where=config.accumulate_on)
        self._vectors = VectorGradients(rank, jobs.slots, ownership)
        partition = rank.partition
        self._arrived = dict[int, list[Tensor]]()  # with `SquaredNorms.parts` of each slice that has been measured
        self._unpolled: set[int] = set()
        speculates = not (config.predicts_clipping or rank.in_place)
        self.norms = GradientNorms(len(rank.blocks), rank.device, speculates=speculates)
        self._factors: list[Tensor] = []  # of the blocks that were submitted in this backward pass
        self.factor_error = DeviceNumber()
        self._zero = torch.zeros((), dtype=rank.dtype, device=rank.device)
        self._rectangles: list[list[Rectangle]] = []  # by slice
        for index, (s, tiles) in enumerate(zip(partition.slices, partition.tiles_by_slice, strict=True)):
            begins = [(tile, partition.tiles[tile].begin) for tile in tiles]
            self._rectangles.append([])
            for whole in tiles_of_slice(index, s):
                parts = [(tile, begin - whole.begin) for tile, begin in begins if whole.begin <= begin < whole.end]
                self._rectangles[-1].append(Rectangle(whole, parts))

    @property
    def arrived(self) -> Set[int]:
        """Slices whose gradient of the whole step has been routed, in that order."""
        return self._arrived.keys()

    def open(self, context: StepContext) -> None:
        """Begins a step; before the first gradient of its last micro-batch."""
        self._jobs.open(context.number)
        self._unpolled.clear()
        self._factors.clear()
        for block in self._rank.blocks:
            block.missing = block.slices.keys() & self._rank.trained.keys()
        self.norms.open(context.number, max_norm=context.inputs.max_norm, loss_scale=context.inputs.loss_scale)
        if self._provisional is not None:
            self._provisional.open(context.inputs.loss_scale)

    def close(self) -> None:
        """Forgets the gradients of a step, which has used or dropped them."""
        self.accumulation.pending.clear()
        self._arrived.clear()

    def receive(self, context: StepContext, slice_index: int, gradient: Tensor) -> None:
        """Takes a gradient of the last micro-batch: [slice.numel], model dtype, on the device; may be changed in place."""
        # A parameter that was unfrozen between two micro-batches is trained from the next step on.
        if slice_index not in self._rank.trained:
            return
        if slice_index in self.accumulation.pending:
            gradient = gradient.add_(self.accumulation.take(slice_index))
        complete = self._route(context, slice_index, gradient)
        if complete and context.submits_in_backward:
            self._submit(complete, context)

    def finish(self, context: StepContext) -> Tensor:
        """Routes the gradients of parameters that the last micro-batch did not use, after backward. Returns the squared norm of this rank's
        gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in sorted(self.accumulation.pending):
            self._route(context, index, self.accumulation.take(index))
            # The next step writes to the sum's memory.
            self._rank.d2h.join()
        for index in sorted(self._rank.trained.keys() - self.arrived):
            if index not in self._vectors.of_slice:
                self._jobs.acquire(self._rank.blocks.of_slice[index], context.number)
                self._route_zeros(index)
                self._slice_complete(index, [])
        self._poll(context.number)
        self._jobs.acquire(self._rank.blocks, context.number)
        rest = [block for block in self._rank.blocks if block not in self._jobs.submitted_in_backward]
        self.norms.add(self._vectors.fill(rest, self.arrived))
        return self.norms.whole()

    def end_step(
        self, squared_norm: Tensor, scale: StepScale, context: StepContext, unscaling: Tensor | None = None
    ) -> None:
        """Takes the step's own squared norm, 0-D float64 of all ranks, its scale, and `GivenFactor.unscaling`."""
        if context.submits_in_backward and context.inputs.max_norm > 0:
            if not self.norms.speculates:
                self.norms.end_step(squared_norm, scale, context.inputs.loss_scale, unscaling)
            if self._factors and not self.factor_error.is_under_way:
                self.factor_error.copy((torch.stack(self._factors) / scale.factor - 1).abs().mean())

    def gradient(self, slice_index: int) -> Tensor:
        """Gradient of a slice in the step that is next, before its last micro-batch the sum so far: [slice.numel], model dtype, on the
        device or the host. Waits for the device.
        """
        if slice_index in self.accumulation.pending:
            return self.accumulation.sum(slice_index)
        if slice_index not in self._arrived:
            s = self._rank.partition.slices[slice_index]
            return torch.zeros(s.numel, dtype=self._rank.dtype, device=self._rank.device)
        if slice_index in self._vectors.of_slice:
            return self._vectors.of_slice[slice_index]
        # The copies to the slots.
        runtime_of(self._rank.device).synchronize()
        return torch.cat([slot.to(self._rank.device) for _, slot in self._jobs.slots.views_of_slice(slice_index)])

    def squared_norm(self, slice_index: int) -> Tensor:
        """Squared norm of `gradient`: 0-D float64 on the device. Waits for nothing where the gradient is on the device or was measured."""
        if parts := self._arrived.get(slice_index):
            return torch.cat(parts).sum(dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(self.gradient(slice_index).to(self._rank.device), dtype=torch.float64)
        return norm.square()

    def unused(self) -> list[int]:
        """Trained slices without a gradient in the step that is next, ascending."""
        return sorted(self._rank.trained.keys() - self.arrived - self.accumulation.pending)

    def _route(self, context: StepContext, slice_index: int, gradient: Tensor) -> list[Block]:
        """Routes one slice's gradient of the whole step; returns the blocks that are complete with it."""
        if slice_index in self._vectors.of_slice:
            self._vectors.of_slice[slice_index].copy_(gradient)
            return self._slice_complete(slice_index, [])
        self._jobs.acquire(self._rank.blocks.of_slice[slice_index], context.number)
        complete = self._slice_complete(slice_index, self._route_rectangles(context, slice_index, gradient))
        self._poll(context.number)
        return complete

    def _route_rectangles(self, context: StepContext, index: int, gradient: Tensor) -> list[Tensor]:
        """Copies one slice's gradient to its destinations, measures it, and updates weights provisionally where it is late. Returns
        `SquaredNorms.parts` of it.
        """
        s = self._rank.partition.slices[index]
        column_norms = context.column_norms if s.is_matrix else None
        provisional = None if context.shows_exact_weights else self._provisional
        may_be_late = provisional is not None and provisional.applies_to(index)
        parts_of_norm, update = [], None
        for whole, parts in self._rectangles[index]:
            matrix = gradient.narrow(0, whole.begin - s.begin, whole.numel).view(whole.rows, whole.width)
            destinations = self._destinations(parts)
            late = []
            if may_be_late and whole.rows > 1:
                of_tiles = zip((self._rank.blocks.of_tile[tile] for tile, _ in parts), destinations, strict=True)
                late = [(block, destination) for block, destination in of_tiles if block.resident is None]
            per_axis = column_norms is not None or bool(late)
            norms = self._rank.kernels.route(
                matrix, destinations, per_axis=per_axis, copies=self._rank.d2h.behind(reads=matrix)
            )
            parts_of_norm.append(norms.parts)
            if column_norms is not None:
                of_columns = column_norms.of_parameter[s.parameter]
                of_columns.narrow(0, whole.first_column, whole.width).add_(norms.columns)
            if late:
                update = matrix, norms, late
        self._rank.telemetry.d2h_bytes += self._rank.host_bytes(index)
        if provisional is not None and update is not None:
            provisional.apply_gradient(context, index, *update)
        self.norms.add(parts_of_norm)
        return parts_of_norm

    def _route_zeros(self, index: int) -> None:
        """Routes a slice without any gradient in the step."""
        for rectangle in self._rectangles[index]:
            for destination in self._destinations(rectangle.parts):
                # From the device: in the order of its streams, the slot may still be read for a kept update.
                destination.slot.copy_(self._zero.expand_as(destination.slot), non_blocking=True)
                if destination.selection is not None:
                    destination.selection.entries.zero_()

    def _destinations(self, parts: Iterable[tuple[int, int]]) -> list[Destination]:
        view, selections = self._jobs.slots.view, self._ownership.selections
        return [Destination(begin=begin, slot=view(tile), selection=selections.get(tile)) for tile, begin in parts]

    def _slice_complete(self, index: int, parts_of_norm: list[Tensor]) -> list[Block]:
        """Notes that a slice's gradient of the whole step has been routed; returns the blocks that are complete with it, ascending."""
        self._arrived[index] = parts_of_norm
        self._unpolled.add(index)
        blocks = self._rank.blocks.of_slice[index]
        for block in blocks:
            block.missing.discard(index)
        return [block for block in blocks if not block.missing]

    def _poll(self, step: int) -> None:
        unpolled, self._unpolled = self._unpolled, set()
        self._jobs.in_flight.poll(step, unpolled)

    def _submit(self, blocks: Iterable[Block], context: StepContext) -> None:
        """Submits complete blocks whose windows close, in a step that submits in backward."""
        inputs = context.inputs
        # Whether there has been a step to predict from, or one to speculate that the next will be like it.
        knows_factor = self._jobs.verification.may_speculate if self.norms.speculates else self.norms.knows_last
        has_factor = inputs.max_norm == 0 or knows_factor
        for block in (block for block in blocks if block.resident is None):
            if submits := has_factor and self._jobs.can_submit_in_backward(block, context.number):
                self._jobs.acquire([block], context.number)
                self.norms.add(self._vectors.fill([block], self.arrived))
            word = self._rank.kernels.block_word(self.norms, block.number)
            if not submits:
                continue
            if not self._jobs.submitted_in_backward:
                self._rank.arena.write_hyperparameters(context.number, list(inputs.groups), tentative=True)
            self._factors.append(word.view(torch.float32)[0])
            self._jobs.submit_in_backward(block, context, word)
