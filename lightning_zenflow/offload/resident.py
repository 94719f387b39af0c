"""Resident blocks: AdamW's state of a block in device memory, where the device applies every step at once; the worker gets no jobs of them.

*Owner.* AdamW's state of a block is with its owner: the host, in the arena, or the device, here. After `lay_down` the arena has all of it,
so that saves and readers of single states know no owners. Resident are the blocks whose gradients arrive last: the worker, which begins
with the first arrivals, then has the most time for the rest.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import accumulate

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import STATE_BYTES, Partition, Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Elements
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import Block, RankState, runs_of


def last_arrivals(partition: Partition, positions: Sequence[int]) -> list[int]:
    """Numbers of the blocks, the one that is complete last in backward first. `positions` has for each parameter, as `Slice.parameter`
    counts, its place in the order of the forward pass, which backward reverses.
    """
    first = [
        min((positions[partition.slices[partition.tiles[tile].slice].parameter] for tile in block.tiles), default=-1)
        for block in partition.blocks
    ]
    return sorted(range(len(first)), key=lambda number: (first[number], number))


def resident_bytes(partition: Partition, numbers: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Device memory of the state and the gradient, of model dtype, of each of these blocks."""
    blocks = map(partition.blocks.__getitem__, numbers)
    return [(block.end - block.begin) * (STATE_BYTES + dtype.itemsize) for block in blocks]


def n_that_fit(sizes: Sequence[int], room: float) -> int:
    """How many of the first of these sizes fit."""
    return bisect_right(list(accumulate(sizes)), room)


_MOST_TIMES = 3
"""That blocks are given back; behind the last, none becomes resident again."""


class ResidentBlock:
    """The state of one block on the device, and the gradient of the open step.

    Attributes:
        state: [3, n] float32: master weights, first and second moments of the block's elements, padding included.
        gradient: [n], model dtype: what `SlotPool.view` gives in the place of a slot.
    """

    def __init__(self, rank: RankState, block: Block) -> None:
        self._rank, self._block = rank, block
        n = rank.partition.blocks[block.number].end - block.begin
        self.state = torch.zeros(3, n, dtype=torch.float32, device=rank.device)
        self.gradient = torch.zeros(n, dtype=rank.dtype, device=rank.device)
        self._slots: dict[int, Tensor] = {}
        self._applied = 0  # the last step
        self.follow_trained()

    def follow_trained(self) -> None:
        """Updates what `RankState.trained` has from now on."""
        partition = self._rank.partition
        tiles_by_missed = defaultdict(list)
        for index in self._block.tiles:
            if (n_missed := self._rank.trained.get(partition.tiles[index].slice)) is not None:
                tiles_by_missed[n_missed].append(index)
        # Adjacent elements that have the same coefficients, with their parameter group and the applied steps that their count lacks.
        self._runs: list[tuple[int, int, Elements]] = []
        for n_missed, tiles in tiles_by_missed.items():
            for first, numel in runs_of(partition, tiles).items():
                tile = partition.tiles[first]
                group, begin = partition.slices[tile.slice].param_group, tile.begin - self._block.begin
                state, gradient = self.state.narrow(1, begin, numel), self.gradient.narrow(0, begin, numel)
                weights = self._rank.weights_at(group, tile.begin, numel)
                self._runs.append((group, n_missed, Elements.of(state, gradient, weights)))

    def slot(self, index: int, tile: Tile) -> Tensor:
        """Place of the gradient of a tile, by its index: [rows, width], model dtype, on the device."""
        # As `SlotPool.view`: a new view takes longer than finding one.
        if index not in self._slots:
            of_tile = self.gradient.narrow(0, tile.begin - self._block.begin, tile.numel)
            self._slots[index] = of_tile.view(tile.rows, tile.width)
        return self._slots[index]

    def step(self, number: int, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """Applies a step, exactly once: a call that an exception has cut is repeated."""
        if self._applied == number:
            return
        kernels = self._rank.kernels
        with nullcontext() if kernels.adamw_is_repeatable else self._rank.records:
            for param_group, n_missed, elements in self._runs:
                kernels.adamw_(elements, groups[param_group], scale.without(n_missed), number)
            self._applied = number

    def load(self, applied: int) -> None:
        """Copies the state from the arena, which has that of `applied` steps."""
        n = self.state.shape[1]
        if (storage := self.state.untyped_storage()).nbytes() == 0:
            storage.resize_(self.state.nbytes)
        for ours, moment in zip(self.state, self._rank.arena.states, strict=True):
            ours.copy_(moment.read(self._block.begin, n))
        for *_, elements in self._runs:
            elements.done.zero_()
        self._applied = applied
        self._rank.telemetry.h2d_bytes += self.state.nbytes

    def lay_down(self) -> None:
        """Copies the state to the arena."""
        # The second moment first: see `CodedMoment`.
        for ours, moment in reversed([*zip(self.state, self._rank.arena.states, strict=True)]):
            moment.write(self._block.begin, ours.cpu())
        self._rank.telemetry.d2h_bytes += self.state.nbytes


class Residents:
    """Owner of the resident blocks of a rank, and of the step that is sealed for them.

    Owners change between two steps. A block becomes resident right behind a flush, where the arena has its state. It is given back behind a
    lay down of its own. What decides is `SchedulePolicy`, and `MemoryWatch` before a backward pass.

    Attributes:
        sizes: device memory of each block with its gradient, in the order in which they become resident.
        blocks: those that are resident. Where there are none, there is nothing to call.
        in_arena: whether the arena has the state of all of them: behind `lay_down`, until the next step is sealed. It may be written there
            then, and is read from there by `load`.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, order: Sequence[int]) -> None:
        """`order` are the numbers of blocks that may be resident, in the order in which they become so."""
        self._rank, self._jobs, self._order = rank, jobs, order
        self.sizes = resident_bytes(rank.partition, order, rank.dtype)
        self.blocks: list[Block] = []
        self._sealed: tuple[int, Sequence[GroupHyperparameters], StepScale] | None = None
        self.in_arena = self._is_loaded = True
        self._number = 0  # the last step that blocks have the state of, or that is sealed for them
        self._n_times = 0  # that blocks were given back

    @property
    def _states(self) -> list[ResidentBlock]:
        return [block.resident for block in self.blocks if block.resident is not None]

    @property
    def n_bytes(self) -> int:
        """Device memory of states and gradients."""
        return sum(self.sizes[: len(self.blocks)])

    def n_fitting(self, room: float) -> int:
        """How many blocks can be resident if `room` bytes of device memory are free."""
        return len(self.blocks) + n_that_fit(self.sizes[len(self.blocks) : len(self._order)], room)

    def n_left_without(self, n_bytes: float) -> int:
        """How many blocks stay resident where at least `n_bytes`, more than 0, are freed."""
        freed = list(accumulate(reversed(self.sizes[: len(self.blocks)])))
        return max(0, len(self.blocks) - 1 - bisect_left(freed, n_bytes))

    def take(self, n_blocks: int, number: int = 0) -> None:
        """Makes the device the owner of the first `n_blocks`, as far as it has memory for them; right behind the flush of a step."""
        runtime_of(self._rank.device).free_cached()
        taken: list[tuple[Block, ResidentBlock]] = []
        with self._rank.telemetry.measure("reserve"), suppress(torch.OutOfMemoryError):
            for block in (self._rank.blocks[index] for index in self._order[len(self.blocks) : n_blocks]):
                resident = ResidentBlock(self._rank, block)
                resident.load(number)
                taken.append((block, resident))
        with self._rank.records:
            for block, resident in taken:
                block.resident = resident
                self.blocks.append(block)
            self._number = number
            self._jobs.follow_owners()

    def give_back(self, n_blocks: int, count: int) -> None:
        """Makes the host the owner of all but the first `n_blocks`, and frees the device memory of the others; between two steps. The last
        one is the `count`-th applied one.
        """
        going = self.blocks[n_blocks:]
        for block in going:
            assert block.resident is not None
            block.resident.lay_down()
        with self._rank.records:
            for block in going:
                block.resident = None
            if len(self.blocks) == len(self._rank.blocks):
                # No job has read a step's word since all blocks were resident, and the ring of words has gone on.
                self._rank.arena.continue_from(self._number, count)
            del self.blocks[n_blocks:]
            self._n_times += 1
            if n_blocks == 0 or self._n_times == _MOST_TIMES:
                self._order = self._order[:n_blocks]
            self._jobs.follow_owners()
        runtime_of(self._rank.device).free_cached()

    def follow_trained(self) -> None:
        """As `ResidentBlock.follow_trained`; right after a flush only."""
        for of_block in self._states:
            of_block.follow_trained()

    def seal(self, number: int, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """Phase *seal*: from here on `step` applies this step; within `RankState.records`."""
        self._sealed, self._number = (number, groups, scale), number
        self.written()

    def written(self) -> None:
        """Notes that the state on the device is to be changed from outside; the arena no longer has it."""
        self.in_arena = not self.blocks

    def step(self) -> None:
        """Phase *update*: applies what is missing of the step that was sealed last. A flush calls it too, behind an interruption."""
        if not self._is_loaded:
            self.load(self._number)
        if self.blocks and self._sealed is not None:
            # The gradients.
            self._rank.d2h.join()
            for of_block in self._states:
                of_block.step(*self._sealed)

    def lay_down(self) -> None:
        """Gives the arena the exact state of all resident blocks; right behind a flush."""
        if self.in_arena:
            return
        with self._rank.telemetry.measure("flush"):
            for of_block in self._states:
                of_block.lay_down()
        self.in_arena = True
        if self._rank.arena.rounds:
            # So that this run goes on from what a resumed one reads.
            self.load(self._number)

    def load(self, number: int) -> None:
        """Takes the state of all resident blocks from the arena, which has that of `number` steps."""
        self._number, self._sealed, self.in_arena, self._is_loaded = number, None, True, False
        for of_block in self._states:
            of_block.load(number)
        # Last: behind an interruption all are loaded again.
        self._is_loaded = True

    def release(self) -> None:
        """Frees the memory of the states, which the arena has, until `load`."""
        assert self.in_arena, "`lay_down` comes before"
        for of_block in self._states:
            of_block.state.untyped_storage().resize_(0)

    def close(self) -> None:
        """Frees the device memory, when training has ended; the arena keeps what it has."""
        for block in self.blocks:
            block.resident = None
        self.blocks, self._sealed = [], None
