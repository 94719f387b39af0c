"""Device-owned entries of one rank: exact fp32 state that the device updates at once.

The arena alone is AdamW's exact state: the worker replays *every* element, the selected columns too (they are scattered over the rows, so
leaving them out would save no memory traffic). The state here is a copy of the selected entries that runs ahead of the arena: it is
updated in the step itself instead of up to S + d - 1 steps later. Therefore a new selection moves nothing back to the host.

The training thread gathers the copy from the arena where that is exact and the trainer's: behind the jobs of a synchronous step, and behind
a flush. So columns change in synchronous steps only, and nothing is reset, dropped or applied twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Partition, Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Selection
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.selection import Columns
from lightning_zenflow.telemetry import Cause
from lightning_zenflow.worker.moments import Moment

_GATHERED_AT_ONCE = 1 << 20
"""Entries of a tile that are gathered and copied at once, by whole rows: 12 MB of page-locked memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """What one call of AdamW updates: entries of one parameter group whose parameters have been frozen for as many steps."""

    groups: Sequence[tuple[int, int]]
    """Parameter group, and the applied steps of the run that AdamW's count lacks."""
    of_slice: Mapping[int, int]
    """For each trained slice, the index of its group."""

    @classmethod
    def of(cls, partition: Partition, slices: Mapping[int, int]) -> "Grouping":
        """Of trained slices, each with the applied steps that it has missed."""
        of_slice = {index: (partition.slices[index].param_group, n_missed) for index, n_missed in slices.items()}
        numbers = {group: number for number, group in enumerate(sorted(set(of_slice.values())))}
        return cls(groups=list(numbers), of_slice={index: numbers[group] for index, group in of_slice.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedTile:
    """Device-owned entries of one tile, [rows, k], which begin at `begin` among those of its group (`Grouping`)."""

    tile: Tile
    number: int
    """Of the tile."""
    group: int
    begin: int
    columns: Columns | None
    """Relative to the tile's first column; None if all of its columns are owned."""
    k: int

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.tile.rows * self.k


class DeviceColumns:
    """Columns that the device owns, and the tensors of their entries: 12 bytes an entry, and the gradient in the model's type. Each group
    (`Grouping`) has one array, so that AdamW is one call for a group, and the write of the weights one for the rank.

    Args:
        columns: for each slice, the device-owned columns over the whole row; None where the device owns all of them.
        grouping: of the entries; slices that are in no group own none.

    Attributes:
        columns: as given.
        numel: number of entries.
        selections: for each tile with such columns, what AdamW needs of its gradient.
    """

    def __init__(self, rank: RankState, columns: Sequence[Columns | None], grouping: Grouping) -> None:
        partition = rank.partition
        self._rank = rank
        self._groups = grouping.groups
        self.columns = columns
        self._tiles: list[OwnedTile] = []
        numels = [0] * len(self._groups)
        for number, tile in enumerate(partition.tiles):
            group = grouping.of_slice.get(tile.slice)
            of_tile, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            if group is not None and k > 0:
                owned = OwnedTile(tile=tile, number=number, group=group, begin=numels[group], columns=of_tile, k=k)
                self._tiles.append(owned)
                numels[group] += owned.numel
        self.numel = sum(numels)
        self._states = [torch.empty(3, n, dtype=torch.float32, device=rank.device) for n in numels]
        # What gradients are gathered into. After `step` or `load` it has the new weights, until the next gradient.
        self._staging = [torch.empty(n, dtype=rank.dtype, device=rank.device) for n in numels]
        self.selections: dict[int, Selection] = {}
        writes: list[ColumnWrite] = []
        for owned in self._tiles:
            tile, on_device = owned.tile, None if owned.columns is None else owned.columns.device
            entries = self._staging[owned.group].narrow(0, owned.begin, owned.numel).view(tile.rows, owned.k)
            param_group, _ = self._groups[owned.group]
            matrix = rank.weights_at(param_group, tile.begin, tile.numel).view(tile.rows, tile.width)
            self.selections[owned.number] = selection = Selection(columns=on_device, entries=entries)
            writes.append((matrix, selection))
        self._write = rank.kernels.column_writer(writes)

    def load(self, cause: Cause) -> None:
        """Gathers the exact state of the entries from the arena, with all of torch's threads; behind a flush or synchronous jobs.

        Args:
            cause: of the time, in which the device has nothing to do.
        """
        rank = self._rank
        assert not any(block.window or block.jobs for block in rank.blocks), "the arena is exact, and the trainer's"
        with rank.telemetry.measure(cause):
            for owned in self._tiles:
                n_rows = max(1, _GATHERED_AT_ONCE // owned.k)
                for row in range(0, owned.tile.rows, n_rows):
                    part = self._gather(owned, row, min(n_rows, owned.tile.rows - row))
                    state = self._states[owned.group].narrow(1, owned.begin + row * owned.k, part.shape[1])
                    for array, values in zip(state, part, strict=True):
                        array.copy_(values, non_blocking=True)
                    rank.telemetry.h2d_bytes += part.nbytes
            for state, staging in zip(self._states, self._staging, strict=True):
                staging.copy_(state[0])

    def _gather(self, owned: OwnedTile, row: int, n_rows: int) -> Tensor:
        """Entries of some rows, [3, n_rows * k] float32, page-locked."""
        arena, width = self._rank.arena, owned.tile.width
        part = runtime_of(self._rank.device).empty_on_host((3, n_rows * owned.k), torch.float32)
        begin = owned.tile.begin + row * width
        for array, to in zip((Moment(arena.master), arena.exp_avg, arena.exp_avg_sq), part, strict=True):
            if owned.columns is None:
                to.copy_(array.read(begin, n_rows * width))
            else:
                to.view(n_rows, owned.k).copy_(array.read_columns(begin, n_rows, width, owned.columns.host))
        return part

    def step(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every entry; `groups` are hyperparameters of each parameter group."""
        of_groups = zip(self._groups, self._states, self._staging, strict=True)
        for (param_group, n_missed), state, staging in of_groups:
            if staging.numel():
                own = replace(scale, count=scale.count - n_missed) if n_missed else scale
                self._rank.kernels.adamw_(state, staging, staging, groups[param_group], own)

    def write_weights(self) -> None:
        """Writes the entries into the model's weights, over published ones."""
        self._write()


class Ownership:
    """What the device owns on one rank at present, at first nothing.

    Attributes:
        current: its columns; None: it owns nothing.
        selections: of `current`, empty where there is none.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self.follow(dict.fromkeys(range(len(rank.partition.slices)), 0))

    def follow(self, slices: Mapping[int, int]) -> None:
        """Makes nothing device-owned, and later entries of these slices only, each with the applied steps that it has missed."""
        self.clear()
        self._grouping = Grouping.of(self._rank.partition, slices)

    def clear(self) -> None:
        """Makes nothing device-owned."""
        self.current: DeviceColumns | None = None
        self.selections: Mapping[int, Selection] = {}

    def take(self, columns: Sequence[Columns | None], cause: Cause) -> None:
        """Makes other columns device-owned, for each slice over the whole row or None for all; behind a flush or synchronous jobs."""
        # First: both at once would take twice the memory.
        self.clear()
        taken = DeviceColumns(self._rank, columns, self._grouping)
        taken.load(cause)
        # Last: behind an interruption nothing writes what is half there.
        self.current, self.selections = taken, taken.selections

    def reload(self) -> None:
        """Gathers the state of every entry and writes its weight, after a flush."""
        if self.current is not None:
            self.current.load("flush")
            self.current.write_weights()

    @property
    def numel(self) -> int:
        """Number of device-owned entries on this rank."""
        return 0 if self.current is None else self.current.numel

    def state_dict(self) -> dict[str, Any]:
        """The columns; the values of their entries are the arena's, right after a flush."""
        columns = {} if self.current is None else {1: [None if c is None else c.host for c in self.current.columns]}
        # Earlier versions had a selection for each block.
        of_block = [next(iter(columns), None)] * len(self._rank.blocks)
        return {"of_block": of_block, "wanted": of_block, "selections": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values are gathered from the arena. Where an earlier version has saved a change of columns that some
        blocks had still to follow, all have followed.
        """
        self.clear()
        if (number := next(iter(state["wanted"]), None)) is not None:
            selection = state["selections"][number]
            self.take(
                [None if c is None else Columns(device=c.to(self._rank.device), host=c) for c in selection], "flush"
            )


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number. Computed on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = columns.host.new_tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    device, host = (of_row[first:last] - tile.first_column for of_row in (columns.device, columns.host))
    return Columns(device=device, host=host), last - first
