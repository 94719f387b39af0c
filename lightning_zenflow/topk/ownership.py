"""Device-owned columns of all blocks, and changes of ownership while training goes on."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Selection
from lightning_zenflow.topk.columns import Columns, DeviceColumns, OffloadedState, PlacedState, ResidentState
from lightning_zenflow.topk.state_export import BlockStates, ExportSection
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker


@dataclass(frozen=True, kw_only=True)
class _PastStep:
    """Inputs of a step that is applied later."""

    groups: Sequence[GroupHyperparameters]
    scale: StepScale
    gradients: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class _Incoming:
    """A block's next columns, before their state has been loaded."""

    columns: DeviceColumns
    steps: list[_PastStep] = field(default_factory=list)
    """Steps after the block's last submission, which the arena does not have yet."""


class Ownership:
    """Owner of all device-owned entries of a rank.

    A new selection reaches each block at that block's own window boundary, in two phases:

    1. *submit*: the window closes. The worker exports the exact state of the new columns behind the window's job. From the next step on,
       their gradients are gathered beside those of the old ones.
    2. *publish*: the job is done. The exported state is loaded, and the d steps since then are applied to it. The old columns need nothing:
       their exact state is in the arena as well.

    Nothing is reset, dropped or applied twice.

    Blocks of the tail may be owned entirely, with 14 bytes of device memory an entry (16 in fp32). They change once, in these two phases.

    Args:
        worker: exports exact state.
        topk_ratio: largest share of the columns that is selected.
        offload: whether the entries' state lives in host memory, from where it is copied to the device for each step.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, *, topk_ratio: float, offload: bool) -> None:
        self._rank = rank
        self._exports = ExportSection(rank, worker, topk_ratio=topk_ratio, offload=offload)
        self._new_state = OffloadedState if offload else ResidentState
        n_blocks = len(rank.partition.blocks)
        self._current: list[DeviceColumns | None] = [None] * n_blocks
        self._incoming: list[_Incoming | None] = [None] * n_blocks
        self._selected: Sequence[Columns | None] = ()
        self._selection_of_block: list[Sequence[Columns | None] | None] = [None] * n_blocks
        self._waiting: set[int] = set()
        self._entire: Sequence[Columns | None] = ()  # the selection of blocks that are owned entirely
        self._owned_entirely: set[int] = set()

    @property
    def numel(self) -> int:
        """Number of device-owned entries on this rank."""
        return sum(columns.numel for columns in self._current if columns is not None)

    @property
    def current(self) -> Sequence[DeviceColumns | None]:
        """Device-owned entries of each block."""
        return self._current

    @property
    def waiting(self) -> Set[int]:
        """Blocks that change their columns with their next window; that window's job must be their only one in flight."""
        return self._waiting

    def select(self, columns: Sequence[Columns | None]) -> None:
        """Makes every block change to these columns at its next window boundary.

        Args:
            columns: for each slice, columns over the whole row; None: all.
        """
        self._selected = columns
        blocks = range(len(self._rank.partition.blocks))
        self._waiting = {block for block in blocks if not self._has_entire(block)}

    def own_entirely(self, blocks: Set[int], columns: Sequence[Columns | None]) -> None:
        """Makes some blocks change at their next window boundary to all of their entries, for good.

        Args:
            blocks: indexes into `Partition.blocks`.
            columns: for each slice None, or no columns where it is frozen; the same in every call until `clear`.
        """
        self._entire = self._entire or columns
        self._owned_entirely.update(blocks)
        self._waiting.update(block for block in blocks if not self._has_entire(block))

    def owns_entirely(self, block: int) -> bool:
        """Whether a block's weights are the device's own, all of them."""
        return self._has_entire(block) and self._incoming[block] is None and self._current[block] is not None

    @property
    def owned_entirely(self) -> Set[int]:
        """Blocks whose weights are the device's own, all of them."""
        return {block for block in self._owned_entirely if self.owns_entirely(block)}

    def _has_entire(self, block: int) -> bool:
        return block in self._owned_entirely and self._selection_of_block[block] is self._entire

    def clear(self) -> None:
        """Makes nothing device-owned."""
        self._waiting.clear()
        self._owned_entirely.clear()
        self._entire = ()
        for block in range(len(self._rank.partition.blocks)):
            self._current[block] = self._incoming[block] = None
            self._selection_of_block[block] = None

    def submitted(self, blocks: Iterable[int]) -> None:
        """Phase *submit* for blocks whose window has just closed."""
        for block in self._waiting.intersection(blocks):
            selection = self._entire if block in self._owned_entirely else self._selected
            columns = self._columns_of(block, selection)
            columns.request("select")
            self._incoming[block] = _Incoming(columns=columns)
            self._selection_of_block[block] = selection
            self._waiting.discard(block)

    def published(self, blocks: Iterable[int]) -> None:
        """Phase *publish* for blocks whose job is done; no other job of theirs may be in flight."""
        for block in blocks:
            incoming = self._incoming[block]
            if incoming is not None:
                incoming.columns.load("select")
                for past in incoming.steps:
                    incoming.columns.step(past.groups, past.scale, past.gradients)
                self._current[block], self._incoming[block] = incoming.columns, None

    def reload(self) -> None:
        """Copies the state of every entry from the arena, after a flush; pending changes of columns are complete then."""
        for block, incoming in enumerate(self._incoming):
            if incoming is not None:
                self._current[block], self._incoming[block] = incoming.columns, None
        self._load_current()

    def selections(self, tile_index: int) -> list[Selection]:
        """Columns of a tile's gradient that `step` needs, and their destinations: present columns, and those to come."""
        block = self._rank.partition.block_of_tile[tile_index]
        current, incoming = self._current[block], self._incoming[block]
        found = [] if current is None else [current.selection(tile_index)]
        if incoming is not None:
            found.append(incoming.columns.selection(tile_index))
        return [selection for selection in found if selection is not None]

    def step(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every owned entry; columns to come record it."""
        for current, incoming in zip(self._current, self._incoming, strict=True):
            if current is not None:
                current.step(groups, scale)
            if incoming is not None:
                gradients = incoming.columns.gradients()
                incoming.steps.append(_PastStep(groups=groups, scale=scale, gradients=gradients))

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights."""
        for columns in self._current:
            if columns is not None:
                columns.write_weights()

    def state_dict(self) -> dict[str, Any]:
        """Present and coming columns of every block, right after a flush; their values are the arena's."""
        selections: list[Sequence[Columns | None]] = []

        def number(selection: Sequence[Columns | None]) -> int:
            for known, other in enumerate(selections):
                if other is selection:
                    return known
            selections.append(selection)
            return len(selections) - 1

        of_block = [None if selection is None else number(selection) for selection in self._selection_of_block]
        selected, entire = number(self._selected), number(self._entire)
        return {
            "entire": entire,
            "owned_entirely": sorted(self._owned_entirely),
            "of_block": of_block,
            "selected": selected,
            "waiting": sorted(self._waiting),
            "selections": [[None if c is None else c.host for c in selection] for selection in selections],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values are loaded from the arena."""
        selections: list[Sequence[Columns | None]] = [
            [None if c is None else Columns(device=c.to(self._rank.device), host=c) for c in selection]
            for selection in state["selections"]
        ]
        self._selected = selections[state["selected"]]
        # Missing in checkpoints of versions without it.
        self._entire = selections[state["entire"]] if "entire" in state else ()
        self._owned_entirely = set(state.get("owned_entirely", ()))
        self._waiting = set(state["waiting"])
        for block, number in enumerate(state["of_block"]):
            self._selection_of_block[block] = selection = None if number is None else selections[number]
            self._incoming[block] = None
            self._current[block] = None if selection is None else self._columns_of(block, selection)
        self._load_current()

    def _load_current(self) -> None:
        # The worker exports one block while the device copies another.
        present = [columns for columns in self._current if columns is not None]
        for columns in present:
            columns.request("flush")
        for columns in present:
            columns.load("flush")

    def _columns_of(self, block: int, selection: Sequence[Columns | None]) -> DeviceColumns:
        if selection is self._entire:
            return DeviceColumns(self._rank, block, selection, BlockStates(self._rank), new_state=PlacedState)
        region = self._exports.next_region(block)
        return DeviceColumns(self._rank, block, selection, region, new_state=self._new_state)
