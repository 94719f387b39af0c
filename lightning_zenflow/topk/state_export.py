"""Exact state of device-owned entries on its way from the worker to the device: the arena's export section.

The worker has all cores, and often still has the rows in its caches. So it gathers the entries of a block itself, behind the block's last
job, into memory that is page-locked for a CUDA device; the training thread enqueues one copy for each parameter group.

Each block has a region of its own (two with `offload: true`), so nothing is ever short and needs to be waited for. A region is a table of
the block's tiles and columns, then its state: 12 bytes for each entry that the block can own at most.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_zenflow.core.device import Event, runtime_of
from lightning_zenflow.core.partition import STATE_BYTES, Partition, Tile, align
from lightning_zenflow.native import protocol
from lightning_zenflow.telemetry.stalls import Cause
from lightning_zenflow.topk.importance import column_count
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import Submission, SupervisedWorker

_COLUMN_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTile:
    """Entries of one tile, [rows, k]."""

    tile: Tile
    columns: Tensor | None
    """[k] int64 on the CPU, ascending, relative to the tile's first column; None: all of them."""
    target: Tensor
    """[3, rows * k] float32, strided: the place of their state, a view of a part of `StateSource.state`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSize:
    """Most that a block can own."""

    n_tiles: int
    n_columns: int
    n_entries: int

    @classmethod
    def of_block(cls, partition: Partition, block: int, topk_ratio: float) -> "RegionSize":
        """Counts the columns of matrices that `topk_ratio` allows, and all elements of vectors."""
        n_tiles = n_columns = n_entries = 0
        for tile in (partition.tiles[index] for index in partition.blocks[block].tiles):
            s = partition.slices[tile.slice]
            k = min(tile.width, column_count(s.columns, topk_ratio) if s.is_matrix else s.columns)
            n_tiles, n_columns, n_entries = n_tiles + 1, n_columns + k, n_entries + tile.rows * k
        return cls(n_tiles=n_tiles, n_columns=n_columns, n_entries=n_entries)

    @property
    def columns_offset(self) -> int:
        """Bytes of the table of tiles."""
        return self.n_tiles * ctypes.sizeof(protocol.ExportTile)

    @property
    def state_offset(self) -> int:
        """Bytes of both tables, rounded up to cache lines."""
        return align(self.columns_offset + self.n_columns * _COLUMN_BYTES)

    @property
    def n_bytes(self) -> int:
        """Size of the region, rounded up to cache lines."""
        return align(self.state_offset + self.n_entries * STATE_BYTES)


def export_bytes(partition: Partition, topk_ratio: float, *, offload: bool) -> int:
    """Size of the export section: 12 bytes for each entry that the device can own at most, twice with `offload`, and the tables."""
    if topk_ratio == 0:
        return 0
    blocks = range(len(partition.blocks))
    return (1 + offload) * sum(RegionSize.of_block(partition, block, topk_ratio).n_bytes for block in blocks)


class StateSource(Protocol):
    """Source of the exact state of one block's entries."""

    def state(self, numel: Sequence[int]) -> list[Tensor]:
        """Places for the state of some groups of entries, [3, n] float32 each, contiguous."""

    def request(self, tiles: Sequence[ExportedTile], cause: Cause) -> None:
        """Asks for the state of the tiles' entries as it is after all jobs submitted so far; their targets are in these places."""

    def wait(self, cause: Cause) -> None:
        """Returns when the requested state, if any, is in its places, in stream order."""

    def used(self) -> None:
        """Notes that the device uses the places until the present end of the current stream."""


class BlockStates:
    """State of whole blocks, which the training thread copies to the device straight from the arena.

    For a tail that the device owns: exporting all of a block would take as much host memory again. The arena must be the trainer's when
    `wait` is called: no job of the block in flight.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._requested: Sequence[ExportedTile] = ()

    def state(self, numel: Sequence[int]) -> list[Tensor]:
        """See `StateSource`; in device memory."""
        return [torch.zeros(3, n, device=self._rank.device) for n in numel]

    def request(self, tiles: Sequence[ExportedTile], cause: Cause) -> None:
        """See `StateSource`."""
        self._requested = tiles

    def wait(self, cause: Cause) -> None:
        """See `StateSource`. Waits for the copies, because the arena's states are not page-locked."""
        requested, self._requested = self._requested, ()
        arena = self._rank.arena
        with self._rank.telemetry.stalls.measure(cause):
            for exported in requested:
                tile = exported.tile
                for target, values in zip(
                    exported.target, (arena.master, arena.exp_avg, arena.exp_avg_sq), strict=True
                ):
                    target.copy_(values.narrow(0, tile.begin, tile.numel))
                self._rank.telemetry.traffic.h2d_bytes += exported.target.nbytes

    def used(self) -> None:
        """See `StateSource`; nothing else writes there."""


class ExportRegion:
    """Part of the export section for the entries of one block.

    It belongs to the worker from `request` until `wait` returns, and otherwise to the device, in stream order.

    Args:
        begin: first byte of the region in the export section.
        size: most entries that are exported at once.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, *, begin: int, size: RegionSize) -> None:
        self._worker = worker
        self._books = rank.books
        self._stalls = rank.telemetry.stalls
        self._runtime = runtime_of(rank.device)
        self._offset = rank.arena.export_offset + begin
        self._size = size
        memory = rank.arena.export.narrow(0, begin, size.n_bytes)
        self._tiles = memory[: size.columns_offset]
        self._columns = memory[size.columns_offset :][: size.n_columns * _COLUMN_BYTES].view(torch.int32)
        self._state = memory[size.state_offset :][: size.n_entries * STATE_BYTES].view(torch.float32)
        self._request: Submission | None = None
        self._last_use: Event | None = None

    def state(self, numel: Sequence[int]) -> list[Tensor]:
        """Places for the state of some groups of entries, [3, n] float32 each, contiguous."""
        parts = torch.split(self._state[: 3 * sum(numel)], [3 * n for n in numel])
        return [part.view(3, n) for part, n in zip(parts, numel, strict=True)]

    def request(self, tiles: Sequence[ExportedTile], cause: Cause) -> None:
        """Makes the worker write the tiles' entries to their targets, as they are after all jobs submitted so far.

        Args:
            tiles: tiles of the block, targets in this region.
            cause: of a wait for the device or for an earlier request, where the region is still in use.
        """
        self.wait(cause)
        if self._last_use is not None and not self._last_use.query():
            with self._stalls.measure(cause):
                self._last_use.synchronize()
        entries = (protocol.ExportTile * len(tiles))()
        n_columns = 0
        for entry, exported in zip(entries, tiles, strict=True):
            tile, target = exported.tile, exported.target
            entry.begin, entry.rows, entry.width, entry.n_columns = tile.begin, tile.rows, tile.width, tile.width
            if exported.columns is not None:
                entry.n_columns = exported.columns.numel()
                entry.columns_offset = self._offset + self._size.columns_offset + n_columns * _COLUMN_BYTES
                self._columns[n_columns : n_columns + entry.n_columns] = exported.columns
                n_columns += entry.n_columns
            entry.target_offset = self._offset + self._size.state_offset + target.data_ptr() - self._state.data_ptr()
            entry.target_stride = target.stride(0)
        if tiles:
            table = torch.frombuffer(entries, dtype=torch.uint8)
            self._tiles[: table.numel()] = table
        with self._books:
            self._request = self._worker.enqueue_export(tiles_offset=self._offset, n_tiles=len(tiles))
        self._worker.send()

    def wait(self, cause: Cause) -> None:
        """Waits until the worker has written what was requested, if anything; a stall only if it has not yet."""
        if self._request is None:
            return
        if not self._worker.has_answered(self._request):
            with self._stalls.measure(cause):
                self._worker.wait_for(self._request)
        self._request = None

    def used(self) -> None:
        """Notes that the device reads or writes the region until the present end of the current stream."""
        self._last_use = self._runtime.record_event()


class ExportSection:
    """Owner of all regions of a rank.

    Args:
        topk_ratio: largest share of the columns that is selected.
        offload: whether the state stays in its region. A block's next state is exported while the present one is in use, so it then has
            two regions.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, *, topk_ratio: float, offload: bool) -> None:
        self._regions: list[deque[ExportRegion]] = []
        begin = 0
        for block in range(len(rank.partition.blocks) if topk_ratio else 0):
            size = RegionSize.of_block(rank.partition, block, topk_ratio)
            self._regions.append(deque())
            for _ in range(1 + offload):
                self._regions[-1].append(ExportRegion(rank, worker, begin=begin, size=size))
                begin += size.n_bytes

    def next_region(self, block: int) -> ExportRegion:
        """The region for a block's next columns. What the columns before the present ones exported is lost."""
        self._regions[block].rotate(1)
        return self._regions[block][0]
