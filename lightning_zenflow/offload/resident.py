"""Resident blocks: AdamW's state of a block in device memory, where the device applies every step at once; the worker gets no jobs of them.

*Owner.* AdamW's state of a block is with its owner: the host, in the arena, or the device, here. After `lay_down` the arena has all of it,
so that saves and readers of single states know no owners. Resident are the blocks whose gradients arrive last: the worker, which begins
with the first arrivals, then has the most time for the rest.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.offload.rank_state import Block, RankState, runs_of
from lightning_zenflow.worker.moments import Moment


def last_arrivals(partition: Partition, positions: Sequence[int], n_blocks: int) -> list[int]:
    """Numbers of the `n_blocks` blocks that are complete last in backward, the last one first. `positions` has for each parameter, as
    `Slice.parameter` counts, its place in the order of the forward pass, which backward reverses.
    """
    first = [
        min((positions[partition.slices[partition.tiles[tile].slice].parameter] for tile in block.tiles), default=-1)
        for block in partition.blocks
    ]
    return sorted(range(len(first)), key=lambda number: (first[number], number))[:n_blocks]


class _Run(NamedTuple):
    """Adjacent elements of a block that have the same coefficients."""

    param_group: int
    n_missed: int
    """Applied steps of the run that AdamW's count of them lacks."""
    state: Tensor
    """[3, n] float32, on the device: master weights and both moments."""
    gradient: Tensor
    """[n], model dtype."""
    weights: Tensor
    """[n], model dtype: the model's."""
    done: Tensor
    """As of `Kernels.adamw_`."""


class ResidentBlock:
    """The state of one block on the device, and the gradient of the open step.

    Attributes:
        state: [3, n] float32: master weights, first and second moments of the block's elements, padding included.
        gradient: [n], model dtype: what `SlotPool.view` gives in the place of a slot.
    """

    def __init__(self, rank: RankState, block: Block, trained: Mapping[int, int]) -> None:
        self._rank, self._block = rank, block
        n = rank.partition.blocks[block.number].end - block.begin
        self.state = torch.zeros(3, n, dtype=torch.float32, device=rank.device)
        self.gradient = torch.zeros(n, dtype=rank.dtype, device=rank.device)
        self._slots: dict[int, Tensor] = {}
        self._applied = 0  # the last step
        self.follow(trained)

    def follow(self, trained: Mapping[int, int]) -> None:
        """Updates these slices from now on, each with the applied steps that it has missed."""
        partition, kernels = self._rank.partition, self._rank.kernels
        tiles_by_missed = defaultdict(list)
        for index in self._block.tiles:
            if (n_missed := trained.get(partition.tiles[index].slice)) is not None:
                tiles_by_missed[n_missed].append(index)
        self._runs: list[_Run] = []
        for n_missed, tiles in tiles_by_missed.items():
            for first, numel in runs_of(partition, tiles).items():
                tile = partition.tiles[first]
                group, begin = partition.slices[tile.slice].param_group, tile.begin - self._block.begin
                self._runs.append(
                    _Run(
                        param_group=group,
                        n_missed=n_missed,
                        state=self.state.narrow(1, begin, numel),
                        gradient=self.gradient.narrow(0, begin, numel),
                        weights=self._rank.weights_at(group, tile.begin, numel),
                        done=kernels.words_of_adamw(numel, self._rank.device),
                    )
                )

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
            for run in self._runs:
                own = replace(scale, count=scale.count - run.n_missed) if run.n_missed else scale
                kernels.adamw_(
                    run.state, run.gradient, run.weights, groups[run.param_group], own, once=(run.done, number)
                )
            self._applied = number

    def load(self) -> None:
        """Copies the state from the arena, where all of it is."""
        n = self.state.shape[1]
        if (storage := self.state.untyped_storage()).nbytes() == 0:
            storage.resize_(self.state.nbytes)
        for ours, moment in zip(self.state, self._in_arena(), strict=True):
            ours.copy_(moment.read(self._block.begin, n))
        for run in self._runs:
            run.done.zero_()
        self._applied = 0
        self._rank.telemetry.h2d_bytes += self.state.nbytes

    def lay_down(self) -> None:
        """Copies the state to the arena."""
        # The second moment first: see `CodedMoment`.
        for ours, moment in reversed([*zip(self.state, self._in_arena(), strict=True)]):
            moment.write(self._block.begin, ours.cpu())
        self._rank.telemetry.d2h_bytes += self.state.nbytes

    def _in_arena(self) -> tuple[Moment, Moment, Moment]:
        arena = self._rank.arena
        return Moment(arena.master), arena.exp_avg, arena.exp_avg_sq


class Residents:
    """Owner of the resident blocks of a rank, and of the step that is sealed for them.

    Attributes:
        in_arena: whether the arena has the state of all of them: behind `lay_down`, until the next step is sealed. It may be written there
            then, and is read from there by `load`.
    """

    def __init__(self, rank: RankState, numbers: Sequence[int]) -> None:
        self._rank = rank
        trained = dict.fromkeys(range(len(rank.partition.slices)), 0)
        self._blocks = [rank.blocks[number] for number in numbers]
        for block in self._blocks:
            block.resident = ResidentBlock(rank, block, trained)
        self._sealed: tuple[int, Sequence[GroupHyperparameters], StepScale] | None = None
        self._is_loaded = False
        self.load()

    @property
    def _states(self) -> list[ResidentBlock]:
        return [block.resident for block in self._blocks if block.resident is not None]

    @property
    def n_bytes(self) -> int:
        """Device memory of states and gradients."""
        return sum(of.state.nbytes + of.gradient.nbytes for of in self._states)

    def follow(self, trained: Mapping[int, int]) -> None:
        """As `ResidentBlock.follow`; right after a flush only."""
        for of_block in self._states:
            of_block.follow(trained)

    def seal(self, number: int, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """Phase *seal*: from here on `step` applies this step; within `RankState.records`."""
        self._sealed = number, groups, scale
        self.written()

    def written(self) -> None:
        """Notes that the state on the device is to be changed from outside; the arena no longer has it."""
        self.in_arena = not self._blocks

    def step(self) -> None:
        """Phase *update*: applies what is missing of the step that was sealed last. A flush calls it too, behind an interruption."""
        if not self._is_loaded:
            self.load()
        if self._blocks and self._sealed is not None:
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
            self.load()

    def close(self) -> None:
        """Frees the device memory, when training has ended; the arena keeps what it has."""
        for block in self._blocks:
            block.resident = None
        self._blocks, self._sealed = [], None

    def release(self) -> None:
        """Frees the memory of the states, which the arena has, until `load`."""
        assert self.in_arena, "`lay_down` comes before"
        for of_block in self._states:
            of_block.state.untyped_storage().resize_(0)

    def load(self) -> None:
        """Takes the state of all resident blocks from the arena, which has been written, or has been laid down."""
        self._sealed, self.in_arena, self._is_loaded = None, True, False
        for of_block in self._states:
            of_block.load()
        # Last: behind an interruption all are loaded again.
        self._is_loaded = True
