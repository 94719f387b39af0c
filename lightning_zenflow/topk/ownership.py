"""Device-owned columns of all blocks, and changes of ownership while training goes on."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Selection
from lightning_zenflow.topk.columns import Columns, DeviceColumns, export_regions
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
    """Owner of all device-owned entries of a rank.

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
        self._regions = export_regions(rank, worker, topk_ratio=topk_ratio)
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

    def submitted(self, blocks: Iterable[int]) -> None:
        """Phase *submit* for blocks whose window has just closed."""
        for number in self.waiting & set(blocks):
            block = self._blocks[number]
            assert block.wanted is not None
            columns = self._columns_of(number, block.wanted)
            columns.request("select")
            block.incoming, block.selection = _Incoming(columns), block.wanted

    def published(self, blocks: Iterable[int]) -> None:
        """Phase *publish* for blocks whose job is done; no other job of theirs may be in flight."""
        for block in (self._blocks[number] for number in blocks):
            if block.incoming is not None:
                columns = block.incoming.columns
                columns.load("select")
                for past in block.incoming.steps:
                    columns.step(*past)
                block.current, block.incoming = columns, None

    def reload(self) -> None:
        """Copies the state of every entry from the arena, after a flush; pending changes of columns are complete then."""
        for block in self._blocks:
            if block.incoming is not None:
                block.current, block.incoming = block.incoming.columns, None
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
        for block in self._blocks:
            if block.current is not None:
                block.current.step(groups, scale)
            if block.incoming is not None:
                block.incoming.steps.append((groups, scale, block.incoming.columns.gradients()))

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights."""
        for columns in self._current:
            columns.write_weights()

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
        self._selections = {
            number: [None if c is None else Columns(device=c.to(self._rank.device), host=c) for c in selection]
            for number, selection in state["selections"].items()
        }
        for number, (selection, wanted) in enumerate(zip(state["of_block"], state["wanted"], strict=True)):
            current = None if selection is None else self._columns_of(number, selection)
            self._blocks[number] = _OwnedBlock(wanted=wanted, selection=selection, current=current)
        self._load_current()

    def _load_current(self) -> None:
        # The worker exports one block while the device copies another.
        current = self._current
        for columns in current:
            columns.request("flush")
        for columns in current:
            columns.load("flush")

    def _columns_of(self, block: int, selection: int) -> DeviceColumns:
        return DeviceColumns(self._rank, block, self._selections[selection], self._regions[block])
