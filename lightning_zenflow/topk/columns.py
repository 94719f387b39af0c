"""Device-owned entries of one block: exact fp32 state that the device updates at once.

The arena alone is AdamW's exact state: the worker replays *every* element, the selected columns too (they are scattered over the rows, so
leaving them out would save no memory traffic). The state here is a copy of the selected entries that runs ahead of the arena: it is
updated in the step itself instead of up to S + d - 1 steps later. Therefore a new selection moves nothing back to the host, and a flush
ends with `DeviceColumns.request` and `DeviceColumns.load`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Selection
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.stalls import Cause
from lightning_zenflow.topk.state_export import ExportedTile, StateSource
from lightning_zenflow.worker.rank_state import RankState


class ColumnState(ABC):
    """Master weights and moments of n entries: [3, n] float32. All kinds give the same bits.

    Args:
        exported: the state as its source gives it, [3, n]: in host memory (page-locked for a CUDA device), or on the device.
        region: source that it is part of.
        device: the training device.
        traffic: counter of copied bytes.
    """

    def __init__(self, exported: Tensor, region: StateSource, device: torch.device, traffic: Traffic) -> None:
        self._exported = exported
        self._region = region
        self._device = device
        self._traffic = traffic

    @property
    def numel(self) -> int:
        """Number of entries n."""
        return self._exported.shape[1]

    @abstractmethod
    def load(self) -> None:
        """Takes over what was exported, in stream order."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Tensor]:
        """[3, n] on the device, in stream order. Changes in place are kept; no reference may outlive the context."""

    @abstractmethod
    def master_on_device(self) -> Tensor:
        """[n], master weights on the device, in stream order; read only."""


class ResidentState(ColumnState):
    """State in device memory: 12 bytes an entry."""

    def __init__(self, exported: Tensor, region: StateSource, device: torch.device, traffic: Traffic) -> None:
        super().__init__(exported, region, device, traffic)
        self._values = torch.empty_like(exported, device=device)

    @override
    def load(self) -> None:
        self._values.copy_(self._exported, non_blocking=True)
        self._region.used()
        self._traffic.h2d_bytes += self._values.nbytes

    @override
    def on_device(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self._values)

    @override
    def master_on_device(self) -> Tensor:
        return self._values[0]


class OffloadedState(ColumnState):
    """State that stays where it is exported to, in host memory, and is copied to the device for each step.

    Copies run in the order of the current stream, and the training thread does not wait for them. The copy back of one step precedes the
    copy in of the next. The worker writes the memory at selections and flushes only, after the last step's copies. Device memory that is
    released within `on_device` is reused by torch's allocator only after its copies.
    """

    @override
    def load(self) -> None:
        """Nothing to do."""

    @override
    @contextmanager
    def on_device(self) -> Iterator[Tensor]:
        on_device = self._copy_in(self._exported)
        yield on_device
        self._exported.copy_(on_device, non_blocking=True)
        self._traffic.d2h_bytes += self._exported.nbytes
        self._region.used()

    @override
    def master_on_device(self) -> Tensor:
        master = self._copy_in(self._exported[0])
        self._region.used()
        return master

    def _copy_in(self, values: Tensor) -> Tensor:
        self._traffic.h2d_bytes += values.nbytes
        # Not `Tensor.to`, which returns the tensor itself where the device is the CPU.
        return torch.empty_like(values, device=self._device).copy_(values, non_blocking=True)


class PlacedState(ColumnState):
    """State in device memory that its source writes there itself (`BlockStates`)."""

    @override
    def load(self) -> None:
        """Nothing to do."""

    @override
    def on_device(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self._exported)

    @override
    def master_on_device(self) -> Tensor:
        return self._exported[0]


NewState = Callable[[Tensor, StateSource, torch.device, Traffic], ColumnState]
"""Constructor of a `ColumnState`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one matrix, on the device and on the host."""

    device: Tensor
    """int64, ascending."""
    host: Tensor
    """The same values on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owned:
    """Selected entries of one tile, [rows, k], which begin at `begin` among the entries of the tile's parameter group."""

    tile: Tile
    param_group: int
    begin: int
    columns: Columns | None
    """Relative to the tile's first column; None if all of its columns are owned."""
    k: int

    @property
    def numel(self) -> int:
        return self.tile.rows * self.k

    def of_group(self, values: Tensor) -> Tensor:
        """The tile's part of a value per entry of the group, as a view [rows, k]."""
        return values.narrow(0, self.begin, self.numel).view(self.tile.rows, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupEntries:
    """Owned entries of one parameter group."""

    state: ColumnState
    staging: Tensor
    """[state.numel], model dtype, on the device: the step's gradient, filled as it arrives; after `step` or `load` the new weights, until
    the next gradient."""


class DeviceColumns:
    """Owner of the device's copy of one block's selected entries.

    Args:
        block: index into `Partition.blocks`.
        columns: for each slice, the device-owned columns over the whole row; None where the device owns all of them.
        region: where their state comes from.
        new_state: `ResidentState` or `OffloadedState`.
    """

    def __init__(
        self,
        rank: RankState,
        block: int,
        columns: Sequence[Columns | None],
        region: StateSource,
        *,
        new_state: NewState,
    ) -> None:
        partition = rank.partition
        self._rank = rank
        self._by_tile: dict[int, _Owned] = {}
        numel = [0] * len(partition.group_begins)
        for tile_index in partition.blocks[block].tiles:
            tile = partition.tiles[tile_index]
            mine, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            if k == 0:
                continue
            param_group = partition.slices[tile.slice].param_group
            owned = _Owned(tile=tile, param_group=param_group, begin=numel[param_group], columns=mine, k=k)
            numel[param_group] += owned.numel
            self._by_tile[tile_index] = owned
        exported = region.state(numel)
        self._region = region
        self._groups = [
            _GroupEntries(
                state=new_state(part, region, of_model.device, rank.telemetry.traffic),
                staging=of_model.new_zeros(part.shape[1]),
            )
            for part, of_model in zip(exported, rank.weights, strict=True)
        ]
        self._exported_tiles = [
            ExportedTile(
                tile=owned.tile,
                columns=None if owned.columns is None else owned.columns.host,
                target=exported[owned.param_group].narrow(1, owned.begin, owned.numel),
            )
            for owned in self._by_tile.values()
        ]
        # Built once, because every step uses them.
        self._selections = {i: self._selection(owned) for i, owned in self._by_tile.items()}
        self._write = rank.kernels.column_writer([self._column_write(i, owned) for i, owned in self._by_tile.items()])

    @property
    def numel(self) -> int:
        """Number of device-owned entries of this block."""
        return sum(group.state.numel for group in self._groups)

    def request(self, cause: Cause) -> None:
        """Makes the worker export the entries' exact state, as it is after the block's last job; no other job of it before `load`.

        Args:
            cause: of a wait, where the device still uses what was exported before.
        """
        self._region.request(self._exported_tiles, cause)

    def load(self, cause: Cause) -> None:
        """Takes over the requested state. A stall only if the worker has not exported it yet."""
        self._region.wait(cause)
        for group in self._groups:
            group.state.load()
            group.staging.copy_(group.state.master_on_device())

    def selection(self, tile_index: int) -> Selection | None:
        """Columns of a tile's gradient that `step` needs, and their destination; None if there are none."""
        return self._selections.get(tile_index)

    def gradients(self) -> list[Tensor]:
        """Copy of the gathered gradients of each parameter group, for a later `step`."""
        return [group.staging.clone() for group in self._groups]

    def step(
        self,
        groups: Sequence[GroupHyperparameters],
        scale: StepScale,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """One exact AdamW step of all entries.

        Args:
            groups: hyperparameters of the step, for each parameter group.
            scale: factor on the gradient and number of applied steps.
            gradients: an earlier result of `gradients`; None: those gathered last.
        """
        for index, (group, h) in enumerate(zip(self._groups, groups, strict=True)):
            if group.state.numel:
                gradient = group.staging if gradients is None else gradients[index]
                self._step_group(group, gradient, h, scale)

    def write_weights(self) -> None:
        """Writes the entries into the model's weights, over published ones; after `step` or `load` only."""
        self._write()

    def _step_group(self, group: _GroupEntries, gradient: Tensor, h: GroupHyperparameters, scale: StepScale) -> None:
        # A method of its own, so that the device copy of an offloaded state is released when it returns.
        with group.state.on_device() as state:
            self._rank.kernels.adamw_(state, gradient, group.staging, h, scale)

    def _selection(self, owned: _Owned) -> Selection:
        return Selection(
            columns=None if owned.columns is None else owned.columns.device,
            target=owned.of_group(self._groups[owned.param_group].staging),
        )

    def _column_write(self, tile_index: int, owned: _Owned) -> ColumnWrite:
        tile, selection = owned.tile, self._selections[tile_index]
        matrix = self._rank.weights_at(owned.param_group, tile.begin, tile.numel).view(tile.rows, tile.width)
        return ColumnWrite(matrix=matrix, columns=selection.columns, selected=selection.target)


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number. Computed on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = torch.tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    device, host = (of_row[first:last] - tile.first_column for of_row in (columns.device, columns.host))
    return Columns(device=device, host=host), last - first
