"""Device-owned columns of all blocks, and changes of ownership while training goes on."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Selection
from lightning_zenflow.offload.columns import Columns, DeviceColumns, adamw, export_regions, region_sizes
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker


@dataclass(frozen=True)
class _Incoming:
    """A block's next columns, before their state has been loaded."""

    columns: DeviceColumns
    steps: list[tuple[Sequence[GroupHyperparameters], StepScale, list[Tensor]]] = field(default_factory=list)
    """Hyperparameters, scales and gradients of the steps after the block's last submission, which the arena does not have yet."""


@dataclass(kw_only=True)
class _OwnedBlock:
    """What the device owns of one block. Numbers are of selections (`Ownership`)."""

    wanted: int | None = None
    """Selection that the block has or changes to with its next window; None: nothing is owned."""
    selection: int | None = None
    """Selection of the columns that were requested last."""
    current: DeviceColumns | None = None
    incoming: _Incoming | None = None


class Ownership:
    """Owner of all device-owned entries of a rank: 12 bytes an entry, and the gradient in the model's type.

    Each block has a segment of each parameter group's arrays, as long as what it can own at most. What is unused is zero, or of columns
    before, and AdamW passes over it. So AdamW is one call for a parameter group, and the write of the weights one for the rank, whatever
    the number of blocks.

    A new selection reaches each block at that block's own window boundary, in two phases:

    1. *submit*: the window closes. The worker exports the exact state of the new columns behind the window's job. From the next step on,
       their gradients are gathered beside those of the old ones.
    2. *publish*: the job is done. The exported state is loaded, and the d steps since then are applied to it. The old columns need nothing:
       their exact state is in the arena as well.

    Nothing is reset, dropped or applied twice.

    Args:
        worker: exports exact state.
        topk_ratio: largest share of the columns that is selected.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, *, topk_ratio: float) -> None:
        self._rank = rank
        self._sizes = region_sizes(rank.partition, topk_ratio)
        self._regions = export_regions(rank, worker, self._sizes)
        # For each parameter group [3, n] float32 and [n] in the model's type (`DeviceColumns`), while columns are owned.
        self._states: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._write: Callable[[], None] | None = None  # made anew when blocks have changed their columns
        self._blocks = [_OwnedBlock() for _ in rank.partition.blocks]
        self._selections: dict[int, Sequence[Columns | None]] = {}
        """By number: for each slice, columns over the whole row; None: all."""

    @property
    def numel(self) -> int:
        """Number of device-owned entries on this rank."""
        return sum(columns.numel for columns in self._current)

    @property
    def _current(self) -> list[DeviceColumns]:
        return [block.current for block in self._blocks if block.current is not None]

    @property
    def waiting(self) -> Set[int]:
        """Blocks that change their columns with their next window; that window's job must be their only one in flight."""
        return {number for number, block in enumerate(self._blocks) if block.wanted != block.selection}

    def select(self, columns: Sequence[Columns | None]) -> None:
        """Makes every block change to these columns at its next window boundary.

        Args:
            columns: for each slice, columns over the whole row; None: all.
        """
        number = max(self._selections, default=0) + 1
        self._selections[number] = columns
        for block in self._blocks:
            block.wanted = number
        # No block has or changes to the others any more.
        in_use = {number for block in self._blocks for number in (block.wanted, block.selection)}
        self._selections = {number: columns for number, columns in self._selections.items() if number in in_use}

    def clear(self) -> None:
        """Makes nothing device-owned."""
        self._blocks = [_OwnedBlock() for _ in self._blocks]
        self._selections.clear()
        self._states, self._staging, self._write = [], [], None

    def submitted(self, blocks: Iterable[int]) -> None:
        """Phase *submit* for blocks whose window has just closed."""
        for number in self.waiting & set(blocks):
            block = self._blocks[number]
            assert block.wanted is not None
            states, staging = self._segments(number)
            # The segment's own has gradients of the present columns.
            columns = self._columns_of(number, block.wanted, states, [torch.zeros_like(t) for t in staging])
            columns.request("select")
            block.incoming, block.selection = _Incoming(columns), block.wanted

    def published(self, blocks: Iterable[int]) -> None:
        """Phase *publish* for blocks whose job is done; no other job of theirs may be in flight."""
        for number in blocks:
            if (incoming := self._blocks[number].incoming) is not None:
                self._settle(number, incoming)
                incoming.columns.load("select")
                for past in incoming.steps:
                    incoming.columns.step(*past)

    def reload(self) -> None:
        """Copies the state of every entry from the arena, after a flush; pending changes of columns are complete then."""
        for number, block in enumerate(self._blocks):
            if block.incoming is not None:
                self._settle(number, block.incoming)
        self._load_current()

    def selections(self, tile_index: int) -> list[Selection]:
        """Columns of a tile's gradient that `step` needs, and their destinations: present columns, and those to come."""
        block = self._blocks[self._rank.partition.block_of_tile[tile_index]]
        found = [] if block.current is None else [block.current.selection(tile_index)]
        if block.incoming is not None:
            found.append(block.incoming.columns.selection(tile_index))
        return [selection for selection in found if selection is not None]

    def step(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every owned entry; columns to come record it."""
        if self._current:
            adamw(self._rank, self._states, self._staging, self._staging, groups, scale)
        for block in self._blocks:
            if block.incoming is not None:
                block.incoming.steps.append((groups, scale, block.incoming.columns.gradients()))

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights, over published ones."""
        if self._write is None:
            writes = [write for columns in self._current for write in columns.writes]
            self._write = self._rank.kernels.column_writer(writes)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Present and coming columns of every block, right after a flush; their values are the arena's."""
        return {
            "of_block": [block.selection for block in self._blocks],
            "wanted": [block.wanted for block in self._blocks],
            "selections": {
                number: [None if c is None else c.host for c in selection]
                for number, selection in self._selections.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values are loaded from the arena."""
        self.clear()
        self._selections = {
            number: [None if c is None else Columns(device=c.to(self._rank.device), host=c) for c in selection]
            for number, selection in state["selections"].items()
        }
        for number, (selection, wanted) in enumerate(zip(state["of_block"], state["wanted"], strict=True)):
            current = None if selection is None else self._columns_of(number, selection, *self._segments(number))
            self._blocks[number] = _OwnedBlock(wanted=wanted, selection=selection, current=current)
        self._load_current()

    def _load_current(self) -> None:
        # The worker exports one block while the device copies another.
        current = self._current
        for columns in current:
            columns.request("flush")
        for columns in current:
            columns.load("flush")

    def _settle(self, block: int, incoming: _Incoming) -> None:
        """Makes columns to come a block's present ones, in its segment; their state is to be loaded."""
        _, staging = self._segments(block)
        incoming.columns.gather_into(staging)
        self._write = None
        self._blocks[block].current, self._blocks[block].incoming = incoming.columns, None

    def _segments(self, block: int) -> tuple[list[Tensor], list[Tensor]]:
        """The block's segments of states and staging, for each parameter group; makes the arrays first if there are none."""
        of_groups = [list(n) for n in zip(*(size.of_groups for size in self._sizes), strict=True)]
        if not self._states:
            numels = [sum(of_blocks) for of_blocks in of_groups]
            self._staging = [w.new_zeros(n) for n, w in zip(numels, self._rank.weights, strict=True)]
            self._states = [torch.zeros(3, n, dtype=torch.float32, device=self._rank.device) for n in numels]
        states = [torch.split(state, n, dim=1)[block] for state, n in zip(self._states, of_groups, strict=True)]
        return states, [torch.split(t, n)[block] for t, n in zip(self._staging, of_groups, strict=True)]

    def _columns_of(
        self, block: int, selection: int, states: Sequence[Tensor], staging: Sequence[Tensor]
    ) -> DeviceColumns:
        columns = self._selections[selection]
        return DeviceColumns(self._rank, block, columns, self._regions[block], states=states, staging=staging)
