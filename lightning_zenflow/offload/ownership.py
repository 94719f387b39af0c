"""Device-owned columns of all blocks, and changes of ownership while training goes on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Selection
from lightning_zenflow.offload.columns import Columns, DeviceColumns, Incoming, adamw, export_regions, region_sizes
from lightning_zenflow.offload.rank_state import Block, Owned, RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker


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
        self._selections: dict[int, Sequence[Columns | None]] = {}
        """By number: for each slice, columns over the whole row; None: all."""

    @property
    def numel(self) -> int:
        """Number of device-owned entries on this rank."""
        return sum(columns.numel for columns in self._current)

    @property
    def _current(self) -> list[DeviceColumns]:
        return [block.owned.current for block in self._rank.blocks if block.owned.current is not None]

    def select(self, columns: Sequence[Columns | None]) -> None:
        """Makes every block change to these columns at its next window boundary.

        Args:
            columns: for each slice, columns over the whole row; None: all.
        """
        number = max(self._selections, default=0) + 1
        self._selections[number] = columns
        for block in self._rank.blocks:
            block.owned.wanted = number
        # No block has or changes to the others any more.
        in_use = {number for block in self._rank.blocks for number in (block.owned.wanted, block.owned.selection)}
        self._selections = {number: columns for number, columns in self._selections.items() if number in in_use}

    def clear(self) -> None:
        """Makes nothing device-owned."""
        for block in self._rank.blocks:
            block.owned = Owned()
        self._selections.clear()
        self._states, self._staging, self._write = [], [], None

    def submitted(self, blocks: Iterable[Block]) -> None:
        """Phase *submit* for blocks whose window has just closed."""
        for block in (block for block in blocks if block.changes_columns):
            owned = block.owned
            assert owned.wanted is not None
            states, staging = self._segments(block)
            # The segment's own has gradients of the present columns.
            columns = self._columns_of(block, owned.wanted, states, [torch.zeros_like(t) for t in staging])
            columns.request("select")
            owned.incoming, owned.selection = Incoming(columns), owned.wanted

    def published(self, blocks: Iterable[Block]) -> None:
        """Phase *publish* for blocks whose job is done; no other job of theirs may be in flight."""
        for block in blocks:
            if (incoming := block.owned.incoming) is not None:
                self._settle(block, incoming)
                incoming.columns.load("select")
                for past in incoming.steps:
                    incoming.columns.step(*past)

    def reload(self) -> None:
        """Copies the state of every entry from the arena, after a flush; pending changes of columns are complete then."""
        for block in self._rank.blocks:
            if block.owned.incoming is not None:
                self._settle(block, block.owned.incoming)
        self._load_current()

    def selections(self, tile_index: int) -> list[Selection]:
        """Columns of a tile's gradient that `step` needs, and their destinations: present columns, and those to come."""
        owned = self._rank.blocks.of_tile[tile_index].owned
        found = [] if owned.current is None else [owned.current.selection(tile_index)]
        if owned.incoming is not None:
            found.append(owned.incoming.columns.selection(tile_index))
        return [selection for selection in found if selection is not None]

    def step(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every owned entry; columns to come record it."""
        if self._current:
            adamw(self._rank, self._states, self._staging, self._staging, groups, scale)
        for block in self._rank.blocks:
            if (incoming := block.owned.incoming) is not None:
                incoming.steps.append((groups, scale, incoming.columns.gradients()))

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights, over published ones."""
        if self._write is None:
            writes = [write for columns in self._current for write in columns.writes]
            self._write = self._rank.kernels.column_writer(writes)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Present and coming columns of every block, right after a flush; their values are the arena's."""
        return {
            "of_block": [block.owned.selection for block in self._rank.blocks],
            "wanted": [block.owned.wanted for block in self._rank.blocks],
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
        for block, selection, wanted in zip(self._rank.blocks, state["of_block"], state["wanted"], strict=True):
            current = None if selection is None else self._columns_of(block, selection, *self._segments(block))
            block.owned = Owned(wanted=wanted, selection=selection, current=current)
        self._load_current()

    def _load_current(self) -> None:
        # The worker exports one block while the device copies another.
        current = self._current
        for columns in current:
            columns.request("flush")
        for columns in current:
            columns.load("flush")

    def _settle(self, block: Block, incoming: Incoming) -> None:
        """Makes columns to come a block's present ones, in its segment; their state is to be loaded."""
        _, staging = self._segments(block)
        incoming.columns.gather_into(staging)
        self._write = None
        block.owned.current, block.owned.incoming = incoming.columns, None

    def _segments(self, block: Block) -> tuple[list[Tensor], list[Tensor]]:
        """The block's segments of states and staging, for each parameter group; makes the arrays first if there are none."""
        of_groups = [list(n) for n in zip(*(size.of_groups for size in self._sizes), strict=True)]
        if not self._states:
            numels = [sum(of_blocks) for of_blocks in of_groups]
            self._staging = [w.new_zeros(n) for n, w in zip(numels, self._rank.weights, strict=True)]
            self._states = [torch.zeros(3, n, dtype=torch.float32, device=self._rank.device) for n in numels]
        states = [torch.split(state, n, dim=1)[block.number] for state, n in zip(self._states, of_groups, strict=True)]
        return states, [torch.split(t, n)[block.number] for t, n in zip(self._staging, of_groups, strict=True)]

    def _columns_of(
        self, block: Block, selection: int, states: Sequence[Tensor], staging: Sequence[Tensor]
    ) -> DeviceColumns:
        columns, region = self._selections[selection], self._regions[block.number]
        return DeviceColumns(self._rank, block.number, columns, region, states=states, staging=staging)
