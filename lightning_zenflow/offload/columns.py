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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_zenflow import native
from lightning_zenflow.core.partition import STATE_BYTES, Partition, Tile, align, column_count
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Selection
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.telemetry import Cause
from lightning_zenflow.worker.supervisor import Submission, SupervisedWorker

_COLUMN_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one matrix, on the device and on the host."""

    device: Tensor
    """int64, ascending."""
    host: Tensor
    """The same values on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedTile:
    """Device-owned entries of one tile, [rows, k], which begin at `begin` among those of the tile's parameter group in its block."""

    tile: Tile
    number: int
    """Of the tile."""
    param_group: int
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
    """Most that a block can own."""

    n_tiles: int
    n_columns: int
    of_groups: tuple[int, ...]
    """Entries of each parameter group."""

    @classmethod
    def of_block(cls, partition: Partition, block: int, topk_ratio: float) -> "RegionSize":
        """Counts the columns of matrices that `topk_ratio` allows, and all elements of vectors."""
        n_columns, of_groups = 0, [0] * len(partition.group_begins)
        for tile in (partition.tiles[index] for index in partition.blocks[block].tiles):
            s = partition.slices[tile.slice]
            k = min(tile.width, column_count(s.columns, topk_ratio) if s.is_matrix else s.columns)
            n_columns += k
            of_groups[s.param_group] += tile.rows * k
        return cls(n_tiles=len(partition.blocks[block].tiles), n_columns=n_columns, of_groups=tuple(of_groups))

    @property
    def n_entries(self) -> int:
        """Entries of all parameter groups."""
        return sum(self.of_groups)

    @property
    def columns_offset(self) -> int:
        """Bytes of the table of tiles."""
        return self.n_tiles * ctypes.sizeof(native.ExportTile)

    @property
    def state_offset(self) -> int:
        """Bytes of both tables, rounded up to cache lines."""
        return align(self.columns_offset + self.n_columns * _COLUMN_BYTES)

    @property
    def n_bytes(self) -> int:
        """Size of the region, rounded up to cache lines."""
        return align(self.state_offset + self.n_entries * STATE_BYTES)


def export_bytes(partition: Partition, topk_ratio: float) -> int:
    """Size of the export section: 12 bytes for each entry that the device can own at most, and the tables."""
    return sum(size.n_bytes for size in region_sizes(partition, topk_ratio))


def region_sizes(partition: Partition, topk_ratio: float) -> list[RegionSize]:
    """Of all blocks; none where nothing is selected."""
    blocks = range(len(partition.blocks) if topk_ratio else 0)
    return [RegionSize.of_block(partition, block, topk_ratio) for block in blocks]


class ExportRegion:
    """Part of the export section for the entries of one block.

    It belongs to the worker from `request` until it has answered, and to the device until the copies of `load` are done. The next request
    needs no wait for these: the worker writes the region behind a job that waits for a later word of the same stream, or after a flush,
    which synchronises.

    Args:
        begin: first byte of the region in the export section.
        size: most entries that are exported at once.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, *, begin: int, size: RegionSize) -> None:
        self._rank = rank
        self._worker = worker
        self._offset = rank.arena.export_offset + begin
        self._size = size
        memory = rank.arena.export.narrow(0, begin, size.n_bytes)
        self._tiles = memory[: size.columns_offset]
        self._columns = memory[size.columns_offset :][: size.n_columns * _COLUMN_BYTES].view(torch.int32)
        self._state = memory[size.state_offset :][: size.n_entries * STATE_BYTES].view(torch.float32)
        self._request: Submission | None = None

    def request(self, tiles: Sequence[OwnedTile], cause: Cause) -> None:
        """Makes the worker write the tiles' entries to the region, as they are after all jobs submitted so far.

        Args:
            tiles: tiles of the block.
            cause: of a wait for an earlier request, whose tables the worker may be reading.
        """
        self._wait(cause)
        numel = [0] * (1 + max((owned.param_group for owned in tiles), default=0))
        for owned in tiles:
            numel[owned.param_group] += owned.numel
        # Behind each other: [3, n] of each parameter group.
        first_bytes = [0, *accumulate(STATE_BYTES * n for n in numel)]
        entries = (native.ExportTile * len(tiles))()
        n_columns = 0
        for entry, owned in zip(entries, tiles, strict=True):
            tile, group = owned.tile, owned.param_group
            entry.begin, entry.rows, entry.width, entry.n_columns = tile.begin, tile.rows, tile.width, owned.k
            entry.first_scale = self._rank.arena.first_scales[owned.number]
            if owned.columns is not None:
                entry.columns_offset = self._offset + self._size.columns_offset + n_columns * _COLUMN_BYTES
                self._columns[n_columns : n_columns + owned.k] = owned.columns.host
                n_columns += owned.k
            begin = first_bytes[group] + owned.begin * self._state.element_size()
            entry.target_offset, entry.target_stride = self._offset + self._size.state_offset + begin, numel[group]
        if tiles:
            table = torch.frombuffer(entries, dtype=torch.uint8)
            self._tiles[: table.numel()] = table
        with self._rank.records:
            self._request = self._worker.enqueue_export(tiles_offset=self._offset, n_tiles=len(tiles))
        self._worker.send()

    def load(self, tiles: Sequence[OwnedTile], states: Sequence[Tensor], cause: Cause) -> None:
        """Copies what was requested, in stream order. A stall only if the worker has not written the region yet.

        Args:
            tiles: those of the request.
            states: for each parameter group, [3, n] float32 on the device, with contiguous rows; the n entries of the tiles in their order.
            cause: of a wait.
        """
        self._wait(cause)
        begin = 0
        for row in (row for state in states for row in state):
            row.copy_(self._state[begin : begin + row.numel()], non_blocking=True)
            begin += row.numel()
            self._rank.telemetry.h2d_bytes += row.nbytes

    def _wait(self, cause: Cause) -> None:
        if self._request is None:
            return
        if not self._worker.has_answered(self._request):
            with self._rank.telemetry.measure(cause):
                self._worker.wait_for(self._request)
        self._request = None


class DeviceColumns:
    """Columns of one block that the device owns, or will own, and the tensors of their entries.

    Args:
        block: index into `Partition.blocks`.
        columns: for each slice, the device-owned columns over the whole row; None where the device owns all of them.
        source: where their exact state comes from.
        states: for each parameter group the block's segment, [3, capacity] float32 on the device: master weights and moments.
        staging: for each parameter group what the entries' gradients are gathered into, [capacity], model dtype. After `step` or `load` it
            has the new weights, until the next gradient.

    Attributes:
        selections: for each tile with such columns, what AdamW needs of its gradient.
        writes: of the entries from `staging` into the model's weights.
    """

    def __init__(
        self,
        rank: RankState,
        block: int,
        columns: Sequence[Columns | None],
        source: ExportRegion,
        *,
        states: Sequence[Tensor],
        staging: Sequence[Tensor],
    ) -> None:
        partition = rank.partition
        self._rank = rank
        self._source = source
        # Steps that the requested state does not have.
        self._later: list[tuple[Sequence[GroupHyperparameters], StepScale, list[Tensor]]] = []
        self._tiles: list[OwnedTile] = []
        self._numels = [0] * len(partition.group_begins)
        for tile_index in partition.blocks[block].tiles:
            tile = partition.tiles[tile_index]
            of_tile, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            if k > 0:
                group = partition.slices[tile.slice].param_group
                begin = self._numels[group]
                owned = OwnedTile(tile=tile, number=tile_index, param_group=group, begin=begin, columns=of_tile, k=k)
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
            entries = owned.of_group(self._staging[owned.param_group])
            matrix = self._rank.weights_at(owned.param_group, tile.begin, tile.numel).view(tile.rows, tile.width)
            self.selections[owned.number] = selection = Selection(columns=on_device, entries=entries)
            self.writes.append((matrix, selection))

    @property
    def numel(self) -> int:
        """Number of device-owned entries of this block."""
        return sum(self._numels)

    def request(self, cause: Cause) -> None:
        """Makes the worker export the entries' exact state, as it is after the block's last job; no other job of it before `load`.

        Args:
            cause: of a wait for an earlier request.
        """
        self._later.clear()
        self._source.request(self._tiles, cause)

    def record(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """Keeps hyperparameters, scale and gathered gradients of a step that the requested state does not have."""
        self._later.append((groups, scale, [staging.clone() for staging in self._staging]))

    def load(self, cause: Cause) -> None:
        """Takes over the requested state and applies the steps since, in stream order. A stall only if the worker has not exported it."""
        self._source.load(self._tiles, self._states, cause)
        for state, staging in zip(self._states, self._staging, strict=True):
            staging.copy_(state[0])
        for groups, scale, gradients in self._later:
            adamw(self._rank, self._states, gradients, self._staging, groups, scale)
        self._later.clear()


def adamw(
    rank: RankState,
    states: Sequence[Tensor],
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    groups: Sequence[GroupHyperparameters],
    scale: StepScale,
) -> None:
    """`Kernels.adamw_` for each parameter group that has entries."""
    for state, gradient, of_group, h in zip(states, gradients, weights, groups, strict=True):
        if gradient.numel():
            rank.kernels.adamw_(state, gradient, of_group, h, scale)


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number. Computed on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = columns.host.new_tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    device, host = (of_row[first:last] - tile.first_column for of_row in (columns.device, columns.host))
    return Columns(device=device, host=host), last - first
