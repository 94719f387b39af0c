"""Which columns the device owns, block by block, and how that changes while training goes on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_zenflow.core.partition import Partition, blocks_of_tiles
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Kernels, Selection
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.topk.columns import Columns, DeviceColumns
from lightning_zenflow.worker.arena import Arena

_WEIGHT_BYTES, _STATE_BYTES = 4, 12
"""Of one entry: its fp32 master weight; this and two fp32 moments."""


@dataclass(frozen=True, kw_only=True)
class _PastStep:
    """What a step needs that is applied later."""

    groups: Sequence[GroupHyperparameters]
    count: Tensor
    scale: StepScale
    gradients: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class _Incoming:
    """A block's next columns, on their way from host to device."""

    columns: DeviceColumns
    steps: list[_PastStep] = field(default_factory=list)
    """The steps after the block's last hand-over, which the state in the arena does not have yet."""


class Ownership:
    """Owner of all device-owned entries of a rank.

    A new selection reaches each block at that block's own window boundary, in these phases:

    1. *hand over*: the window closes; from the next step on, the gradients of the new columns are gathered beside those of the old
       ones.
    2. *publish*: the round is done, so the arena holds the new columns' exact state as of the hand-over; it is loaded, and the d
       steps since then are applied to it. Old columns need nothing: their exact state is in the arena as well.

    Nothing is reset, dropped or applied twice.

    Args:
        partition: the rank's partition.
        arena: where exact state is loaded from.
        replayed: whether the worker replays device-owned entries too, so that the arena is their exact state; otherwise it is written
            there first.
        offload: whether the entries' state lives in host memory, from where it visits the device block by block.
        kernels: passes over gradients and entries.
        traffic: where copied bytes are counted.
        weights: for each parameter group, the rank's flat partition of the model's weights, on the device.
    """

    def __init__(
        self,
        partition: Partition,
        arena: Arena,
        *,
        replayed: bool,
        offload: bool,
        kernels: Kernels,
        traffic: Traffic,
        weights: Sequence[Tensor],
    ) -> None:
        self._partition = partition
        self._arena = arena
        self._replayed = replayed
        self._offload = offload
        self._kernels = kernels
        self._weights = weights
        self._traffic = traffic
        self._block_of_tile = blocks_of_tiles(partition)
        self._current: list[DeviceColumns | None] = [None] * len(partition.blocks)
        self._incoming: list[_Incoming | None] = [None] * len(partition.blocks)
        self._selected: Sequence[Columns | None] = ()
        self._selection_of_block: list[Sequence[Columns | None] | None] = [None] * len(partition.blocks)
        self._waiting: set[int] = set()

    @property
    def numel(self) -> int:
        """Entries that the device owns on this rank."""
        return sum(columns.numel for columns in self._current if columns is not None)

    def select(self, columns: Sequence[Columns | None]) -> None:
        """Has every block change to these columns at its next window boundary.

        Args:
            columns: for each slice, the columns over the whole row; None means all.
        """
        self._selected = columns
        self._waiting = set(range(len(self._partition.blocks)))

    def waits(self, block: int) -> bool:
        """Whether the block will change its columns at its next window boundary; that round must be its only one in flight."""
        return block in self._waiting

    def clear(self) -> None:
        """Forgets everything: nothing is device-owned."""
        self._waiting.clear()
        for block in range(len(self._partition.blocks)):
            self._current[block] = self._incoming[block] = None
            self._selection_of_block[block] = None

    def submitted(self, blocks: Iterable[int]) -> None:
        """Phase *hand over* for the blocks whose window just closed."""
        for block in self._waiting.intersection(blocks):
            self._incoming[block] = _Incoming(columns=self._columns_of(block, self._selected))
            self._selection_of_block[block] = self._selected
            self._waiting.discard(block)

    def _columns_of(self, block: int, selection: Sequence[Columns | None]) -> DeviceColumns:
        return DeviceColumns(
            self._partition,
            block,
            selection,
            weights=self._weights,
            offload=self._offload,
            kernels=self._kernels,
        )

    def state_dict(self) -> dict[str, Any]:
        """Which columns every block has and will have; right after a flush only. Their values are the arena's."""
        selections: list[Sequence[Columns | None]] = []

        def number(selection: Sequence[Columns | None]) -> int:
            for known, other in enumerate(selections):
                if other is selection:
                    return known
            selections.append(selection)
            return len(selections) - 1

        of_block = [None if selection is None else number(selection) for selection in self._selection_of_block]
        selected = number(self._selected)
        return {
            "of_block": of_block,
            "selected": selected,
            "waiting": sorted(self._waiting),
            "selections": [[None if c is None else c.host for c in selection] for selection in selections],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the columns back, with the values that the arena has now."""
        selections: list[Sequence[Columns | None]] = [
            [None if c is None else Columns(device=c.to(self._weights[0].device), host=c) for c in selection]
            for selection in state["selections"]
        ]
        self._selected = selections[state["selected"]]
        self._waiting = set(state["waiting"])
        for block, number in enumerate(state["of_block"]):
            self._selection_of_block[block] = selection = None if number is None else selections[number]
            self._incoming[block] = None
            self._current[block] = columns = None if selection is None else self._columns_of(block, selection)
            if columns is not None:
                self._load(columns)

    def changes(self, blocks: Iterable[int]) -> bool:
        """Whether any of the blocks has new columns on their way."""
        return any(self._incoming[block] is not None for block in blocks)

    def published(self, blocks: Iterable[int]) -> None:
        """Phase *publish* for the blocks whose round is done; no other round of theirs may be in flight."""
        for block in blocks:
            incoming = self._incoming[block]
            if incoming is not None:
                self._store(block)
                self._load(incoming.columns)
                for past in incoming.steps:
                    incoming.columns.step(past.groups, past.count, past.scale, past.gradients)
                self._count_visits(incoming.columns, len(incoming.steps))
                self._current[block], self._incoming[block] = incoming.columns, None

    def reload(self) -> None:
        """Takes every entry from the arena, after a flush; changes of columns that were under way are complete then."""
        for block, incoming in enumerate(self._incoming):
            self._store(block)
            if incoming is not None:
                self._current[block], self._incoming[block] = incoming.columns, None
        for columns in self._current:
            if columns is not None:
                self._load(columns)

    def _load(self, columns: DeviceColumns) -> None:
        columns.load(self._arena)
        # What visits only leaves its weights on the device.
        self._traffic.h2d_bytes += (_WEIGHT_BYTES if self._offload else _STATE_BYTES) * columns.numel

    def _count_visits(self, columns: DeviceColumns, times: int) -> None:
        if self._offload:
            n_bytes = times * _STATE_BYTES * columns.numel
            self._traffic.h2d_bytes += n_bytes
            self._traffic.d2h_bytes += n_bytes

    def _store(self, block: int) -> None:
        columns = self._current[block]
        if columns is not None and not self._replayed:
            columns.store(self._arena)
            self._traffic.d2h_bytes += 0 if self._offload else _STATE_BYTES * columns.numel

    def selections(self, tile_index: int) -> list[Selection]:
        """Which columns of a tile's gradient are kept for `step`, and where: those that are owned, and those that will be."""
        block = self._block_of_tile[tile_index]
        current, incoming = self._current[block], self._incoming[block]
        found = [] if current is None else [current.selection(tile_index)]
        if incoming is not None:
            found.append(incoming.columns.selection(tile_index))
        return [selection for selection in found if selection is not None]

    def step(self, groups: Sequence[GroupHyperparameters], count: Tensor, scale: StepScale) -> None:
        """One exact AdamW step of every owned entry; incoming ones remember it."""
        for current, incoming in zip(self._current, self._incoming, strict=True):
            if current is not None:
                current.step(groups, count, scale)
                self._count_visits(current, 1)
            if incoming is not None:
                gradients = incoming.columns.gradients()
                incoming.steps.append(_PastStep(groups=groups, count=count.clone(), scale=scale, gradients=gradients))

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights."""
        for columns in self._current:
            if columns is not None:
                columns.write_weights()
