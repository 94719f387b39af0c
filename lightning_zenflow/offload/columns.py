"""Device-owned entries of one block: exact fp32 state that the device updates at once, and its way from the worker.

The arena alone is AdamW's exact state: the worker replays *every* element, the selected columns too (they are scattered over the rows, so
leaving them out would save no memory traffic). The state here is a copy of the selected entries that runs ahead of the arena: it is
updated in the step itself instead of up to S + d - 1 steps later. Therefore a new selection moves nothing back to the host, and a flush
ends with `DeviceColumns.request` and `DeviceColumns.load`.

The worker has all cores, and often still has the rows in its caches. So it gathers the entries of a block itself, behind the block's last
job, into memory that is page-locked for a CUDA device; the training thread enqueues one copy for each parameter group.

Each block has a region of its own, so nothing is ever short and needs to be waited for. A region is a table of the block's tiles and
columns, then its state: 12 bytes for each entry that the block can own at most.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from lightning_zenflow import native
from lightning_zenflow.core.partition import STATE_BYTES, Partition, Tile, align, column_count
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Selection
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.telemetry import Cause
from lightning_zenflow.worker.supervisor import Submission

_COLUMN_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one matrix, on the device and on the host."""

    device: Tensor
    """int64, ascending."""
    host: Tensor
    """The same values on the CPU."""


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
    """Device-owned entries of one tile, [rows, k], which begin at `begin` among those of its group (`Grouping`) in its block."""

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

    def of_group(self, values: Tensor) -> Tensor:
        """The tile's part of a value per entry of the group, as a view [rows, k]."""
        return values.narrow(0, self.begin, self.numel).view(self.tile.rows, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSize:
    """Most that a block can own, and the places of its parts of a region, in bytes."""

    of_slices: Mapping[int, int]
    """Entries of each slice."""
    columns_offset: int
    """Behind the table of tiles."""
    state_offset: int
    """Behind both tables, on a cache line."""
    n_bytes: int
    """Size of the region, rounded up to cache lines."""

    @classmethod
    def of_block(cls, partition: Partition, block: int, topk_ratio: float) -> "RegionSize":
        """Counts the columns of matrices that `topk_ratio` allows, and all elements of vectors."""
        n_columns, of_slices = 0, dict[int, int]()
        tiles = partition.blocks[block].tiles
        for tile in (partition.tiles[index] for index in tiles):
            s = partition.slices[tile.slice]
            k = min(tile.width, column_count(s.columns, topk_ratio) if s.is_matrix else s.columns)
            n_columns += k
            of_slices[tile.slice] = of_slices.get(tile.slice, 0) + tile.rows * k
        columns_offset = len(tiles) * ctypes.sizeof(native.ExportTile)
        state_offset = align(columns_offset + n_columns * _COLUMN_BYTES)
        return cls(
            of_slices=of_slices,
            columns_offset=columns_offset,
            state_offset=state_offset,
            n_bytes=align(state_offset + sum(of_slices.values()) * STATE_BYTES),
        )


def export_bytes(partition: Partition, topk_ratio: float) -> int:
    """Size of the export section: 12 bytes for each entry that the device can own at most, and the tables."""
    return sum(size.n_bytes for size in region_sizes(partition, topk_ratio))


def region_sizes(partition: Partition, topk_ratio: float) -> list[RegionSize]:
    """Of all blocks; none where nothing is selected."""
    blocks = range(len(partition.blocks) if topk_ratio else 0)
    return [RegionSize.of_block(partition, block, topk_ratio) for block in blocks]


class ExportRegion:
    """Part of the export section for the entries of one block (`DeviceColumns`).

    It belongs to the worker from a request until it has answered, and to the device until the copies of `DeviceColumns.load` are done. The
    next request needs no wait for these: the worker writes the region behind a job that waits for a later word of the same stream, or after
    a flush, which synchronises.

    Args:
        begin: first byte of the region in the export section.
        size: most entries that are exported at once.

    Attributes:
        offset: first byte of the region in the arena.
        tiles: uint8, `native.ExportTile` of each tile.
        columns: int32, of the tiles.
        state: float32, behind each other [3, n] of each parameter group.
        request: the last one, until its answer has been awaited.
    """

    def __init__(self, rank: RankState, *, begin: int, size: RegionSize) -> None:
        self._rank = rank
        self.size = size
        self.offset = rank.arena.export_offset + begin
        memory = rank.arena.export.narrow(0, begin, size.n_bytes)
        self.tiles = memory[: size.columns_offset]
        self.columns = memory[size.columns_offset : size.state_offset].view(torch.int32)
        self.state = memory[size.state_offset :].view(torch.float32)
        self.request: Submission | None = None

    def wait(self, cause: Cause) -> None:
        """Waits until the worker has answered the last request, and reads and writes the region no more."""
        if self.request is not None and not self._rank.worker.has_answered(self.request):
            with self._rank.telemetry.measure(cause):
                self._rank.worker.wait_for(self.request)
        self.request = None


class DeviceColumns:
    """Columns of one block that the device owns, or will own, and the tensors of their entries.

    Args:
        block: index into `Partition.blocks`.
        columns: for each slice, the device-owned columns over the whole row; None where the device owns all of them.
        region: where their exact state comes from.
        grouping: of the entries.
        states: for each group the block's segment, [3, capacity] float32 on the device: master weights and moments.
        staging: for each group what the entries' gradients are gathered into, [capacity], model dtype. After `step` or `load` it has the
            new weights, until the next gradient.

    Attributes:
        selections: for each tile with such columns, what AdamW needs of its gradient.
        writes: of the entries from `staging` into the model's weights.
    """

    def __init__(
        self,
        rank: RankState,
        block: int,
        columns: Sequence[Columns | None],
        region: ExportRegion,
        grouping: Grouping,
        *,
        states: Sequence[Tensor],
        staging: Sequence[Tensor],
    ) -> None:
        partition = rank.partition
        self._rank = rank
        self._region = region
        self._groups = grouping.groups
        # Steps that the requested state does not have.
        self._later: list[tuple[Sequence[GroupHyperparameters], StepScale, list[Tensor]]] = []
        self._tiles: list[OwnedTile] = []
        self._numels = [0] * len(self._groups)
        for tile_index in partition.blocks[block].tiles:
            tile = partition.tiles[tile_index]
            of_tile, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            if k > 0:
                group = grouping.of_slice[tile.slice]
                begin = self._numels[group]
                owned = OwnedTile(tile=tile, number=tile_index, group=group, begin=begin, columns=of_tile, k=k)
                self._tiles.append(owned)
                self._numels[group] += owned.numel
        self._states = [of_group.narrow(1, 0, n) for of_group, n in zip(states, self._numels, strict=True)]
        self.gather_into(staging)

    def gather_into(self, staging: Sequence[Tensor]) -> None:
        """Gathers gradients into other tensors from now on, and takes the new weights from there."""
        self._staging = [of_group.narrow(0, 0, n) for of_group, n in zip(staging, self._numels, strict=True)]
        # Built once, because every step uses them.
        self.selections: dict[int, Selection] = {}
        self.writes: list[ColumnWrite] = []
        for owned in self._tiles:
            tile, on_device = owned.tile, None if owned.columns is None else owned.columns.device
            entries = owned.of_group(self._staging[owned.group])
            param_group, _ = self._groups[owned.group]
            matrix = self._rank.weights_at(param_group, tile.begin, tile.numel).view(tile.rows, tile.width)
            self.selections[owned.number] = selection = Selection(columns=on_device, entries=entries)
            self.writes.append((matrix, selection))

    @property
    def numel(self) -> int:
        """Number of device-owned entries of this block."""
        return sum(self._numels)

    def request(self, cause: Cause) -> None:
        """Makes the worker export the entries' exact state, as it is after all jobs submitted so far; no other job of the block before
        `load`.

        Args:
            cause: of a wait for an earlier request, whose tables the worker may be reading.
        """
        self._later.clear()
        rank, region = self._rank, self._region
        region.wait(cause)
        first_bytes = [0, *accumulate(STATE_BYTES * n for n in self._numels)]
        entries = (native.ExportTile * len(self._tiles))()
        n_columns = 0
        for entry, owned in zip(entries, self._tiles, strict=True):
            tile, group = owned.tile, owned.group
            entry.begin, entry.rows, entry.width, entry.n_columns = tile.begin, tile.rows, tile.width, owned.k
            entry.first_scale = rank.arena.first_scales[owned.number]
            if owned.columns is not None:
                entry.columns_offset = region.offset + region.size.columns_offset + n_columns * _COLUMN_BYTES
                region.columns[n_columns : n_columns + owned.k] = owned.columns.host
                n_columns += owned.k
            begin = first_bytes[group] + owned.begin * region.state.element_size()
            entry.target_offset = region.offset + region.size.state_offset + begin
            entry.target_stride = self._numels[group]
        if self._tiles:
            table = torch.frombuffer(entries, dtype=torch.uint8)
            region.tiles[: table.numel()] = table
        with rank.records:
            region.request = rank.worker.enqueue_export(tiles_offset=region.offset, n_tiles=len(self._tiles))
        rank.worker.send()

    def record(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """Keeps hyperparameters, scale and gathered gradients of a step that the requested state does not have."""
        self._later.append((groups, scale, [staging.clone() for staging in self._staging]))

    def load(self, cause: Cause) -> None:
        """Takes over the requested state and applies the steps since, in stream order. A stall only if the worker has not exported it."""
        self._region.wait(cause)
        begin = 0
        for row in (row for state in self._states for row in state):
            row.copy_(self._region.state[begin : begin + row.numel()], non_blocking=True)
            begin += row.numel()
            self._rank.telemetry.h2d_bytes += row.nbytes
        for state, staging in zip(self._states, self._staging, strict=True):
            staging.copy_(state[0])
        for groups, scale, gradients in self._later:
            adamw(self._rank, self._groups, self._states, gradients, self._staging, groups, scale)
        self._later.clear()


def adamw(
    rank: RankState,
    groups: Sequence[tuple[int, int]],
    states: Sequence[Tensor],
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    hyperparameters: Sequence[GroupHyperparameters],
    scale: StepScale,
) -> None:
    """`Kernels.adamw_` for each group (`Grouping`) that has entries; hyperparameters are those of each parameter group."""
    for (param_group, n_missed), state, gradient, of_group in zip(groups, states, gradients, weights, strict=True):
        if gradient.numel():
            own = replace(scale, count=scale.count - n_missed) if n_missed else scale
            rank.kernels.adamw_(state, gradient, of_group, hyperparameters[param_group], own)


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number. Computed on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = columns.host.new_tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    device, host = (of_row[first:last] - tile.first_column for of_row in (columns.device, columns.host))
    return Columns(device=device, host=host), last - first
