"""The entries that the device owns in one block: exact fp32 state, updated on the device at once.

The host arena stays complete: the worker replays *every* element, these too (selected columns are scattered over the rows, so leaving them
out would save no memory traffic), hence the arena alone is the exact AdamW state. What is held here is a copy of the selected
entries that runs ahead of it, updated at once instead of up to S + d steps later. That is why a new selection moves nothing back
to the host, and why a flush ends with `load`. Only where the worker does not replay but applies mean gradients
(`deferred_update: accumulate`) is this copy the exact one, and then `store` comes first. Whether it lives on the device or visits it for
the step is the business of `column_states.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import Partition, Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Kernels, Selection
from lightning_zenflow.worker.arena import Arena


class ColumnState(ABC):
    """Master weights and moments of n entries: [3, n] float32.

    Args:
        values: the state, where it lives.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def numel(self) -> int:
        """Entries n."""
        return self._values.shape[1]

    @abstractmethod
    def where_it_lives(self) -> Tensor:
        """[3, n], for reading and writing between visits. Waits for the device where it still copies from or to host memory."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Tensor]:
        """[3, n] on the device, in stream order. What is changed in place within the context is kept; no reference may outlive it."""

    @abstractmethod
    def master_on_device(self) -> Tensor:
        """[n], the master weights on the device, in stream order; to be read only."""


class ResidentState(ColumnState):
    """State that stays on the device: 12 bytes an entry of its memory.

    Args:
        numel: entries n.
        device: where it stays.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(torch.empty(3, numel, device=device))

    @override
    def where_it_lives(self) -> Tensor:
        return self._values

    @override
    def on_device(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self._values)

    @override
    def master_on_device(self) -> Tensor:
        return self._values[0]


class VisitingState(ColumnState):
    """State in host memory, page-locked where the device is CUDA; on the device only during a visit.

    Visits are copies in stream order, and the training thread does not wait for them. All of them run on the stream of the optimizer
    step, so the copy back of one visit precedes the copy in of the next. The host itself reads and writes the memory at
    selections and flushes only; it first waits for the last visit's copies. Memory that is given up during a visit is reused by torch's
    allocator after its copies only.

    Args:
        numel: entries n.
        device: what it visits.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(torch.empty(3, numel, pin_memory=device.type == "cuda"))
        self._device = device
        self._last_visit: torch.cuda.Event | None = None

    @override
    def where_it_lives(self) -> Tensor:
        if self._last_visit is not None:
            self._last_visit.synchronize()
        return self._values

    @override
    @contextmanager
    def on_device(self) -> Iterator[Tensor]:
        visiting = self._copy_in(self._values)
        yield visiting
        self._values.copy_(visiting, non_blocking=True)
        self._end_visit()

    @override
    def master_on_device(self) -> Tensor:
        master = self._copy_in(self._values[0])
        self._end_visit()
        return master

    def _copy_in(self, values: Tensor) -> Tensor:
        # Not `Tensor.to`, which returns the tensor itself where the device is the CPU.
        return torch.empty_like(values, device=self._device).copy_(values, non_blocking=True)

    def _end_visit(self) -> None:
        if self._device.type == "cuda":
            if self._last_visit is None:
                self._last_visit = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last_visit.record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one matrix, the same ones on the device and on the host."""

    device: Tensor
    """int64, ascending."""
    host: Tensor
    """The same on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owned:
    """The selected entries of one tile: rectangle [rows, k] at `begin` in the flat entries of the tile's parameter group."""

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
        """The tile's part of the group's values, one an entry, as [rows, k], a view."""
        return values.narrow(0, self.begin, self.numel).view(self.tile.rows, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupEntries:
    """One parameter group's owned entries."""

    state: ColumnState
    staging: Tensor
    """[state.numel], model dtype, on the device: what comes from the model and what goes there. The step's gradient, filled as it arrives;
    after `step` or `load` the new weights, until the next gradient."""


class DeviceColumns:
    """Owner of the copy of one block's selected entries that the device updates.

    Args:
        partition: the rank's partition.
        block: index into `Partition.blocks`.
        columns: for each slice, the columns that the device owns, over the whole row; None where it owns all of them.
        weights: for each parameter group, the rank's flat partition of the model's weights, on the device.
        offload: whether their state lives in host memory and visits the device.
        kernels: passes over entries.
    """

    def __init__(
        self,
        partition: Partition,
        block: int,
        columns: Sequence[Columns | None],
        *,
        weights: Sequence[Tensor],
        offload: bool,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
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
        state_class = VisitingState if offload else ResidentState
        self._groups = [
            _GroupEntries(state=state_class(n, of_model.device), staging=of_model.new_zeros(n))
            for n, of_model in zip(numel, weights, strict=True)
        ]
        # Made once, since every step uses them.
        self._selections = {i: self._selection(owned) for i, owned in self._by_tile.items()}
        self._write = kernels.column_writer(
            [self._column_write(i, owned, partition, weights) for i, owned in self._by_tile.items()]
        )

    def _selection(self, owned: _Owned) -> Selection:
        return Selection(
            columns=None if owned.columns is None else owned.columns.device,
            target=owned.of_group(self._groups[owned.param_group].staging),
        )

    def _column_write(
        self, tile_index: int, owned: _Owned, partition: Partition, weights: Sequence[Tensor]
    ) -> ColumnWrite:
        tile, selection = owned.tile, self._selections[tile_index]
        begin = tile.begin - partition.group_begins[owned.param_group]
        rectangle = weights[owned.param_group].narrow(0, begin, tile.numel).view(tile.rows, tile.width)
        return ColumnWrite(matrix=rectangle, columns=selection.columns, selected=selection.target)

    @property
    def numel(self) -> int:
        """Entries that the device owns in this block."""
        return sum(group.state.numel for group in self._groups)

    def load(self, arena: Arena) -> None:
        """Takes the entries' exact state from the arena; the block's last round must be done."""
        for owned, ours, theirs in self._side_by_side(arena):
            ours.copy_(theirs if owned.columns is None else theirs.index_select(2, owned.columns.host))
        for group in self._groups:
            group.staging.copy_(group.state.master_on_device())

    def store(self, arena: Arena) -> None:
        """Writes the entries' state into the arena; the block's last round must be done. The inverse of `load`."""
        for owned, ours, theirs in self._side_by_side(arena):
            if owned.columns is None:
                theirs.copy_(ours)
            else:
                theirs.index_copy_(2, owned.columns.host, ours.cpu())

    def _side_by_side(self, arena: Arena) -> Iterator[tuple[_Owned, Tensor, Tensor]]:
        """Each tile's weights and moments: here [3, rows, k], and in the arena [3, rows, width], both views."""
        states = [group.state.where_it_lives() for group in self._groups]
        for owned in self._by_tile.values():
            tile = owned.tile
            yield (
                owned,
                states[owned.param_group].narrow(1, owned.begin, owned.numel).view(3, tile.rows, owned.k),
                arena.states.narrow(1, tile.begin, tile.numel).view(3, tile.rows, tile.width),
            )

    def selection(self, tile_index: int) -> Selection | None:
        """Which columns of a tile's gradient are wanted for `step`, and where; None if none are."""
        return self._selections.get(tile_index)

    def gradients(self) -> list[Tensor]:
        """A copy of the gathered gradients, for `step` later."""
        return [group.staging.clone() for group in self._groups]

    def step(
        self,
        groups: Sequence[GroupHyperparameters],
        count: Tensor,
        scale: StepScale,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """One exact AdamW step of every owned entry, with the gathered gradients or with earlier ones."""
        for index, (group, hyperparameters) in enumerate(zip(self._groups, groups, strict=True)):
            if group.state.numel:
                gradient = group.staging if gradients is None else gradients[index]
                self._step_group(group, gradient, hyperparameters, count, scale)

    def _step_group(
        self,
        group: _GroupEntries,
        gradient: Tensor,
        hyperparameters: GroupHyperparameters,
        count: Tensor,
        scale: StepScale,
    ) -> None:
        """One parameter group's step. A method of its own: what visits the device is gone when it returns."""
        with group.state.on_device() as state:
            self._kernels.adamw_(
                state, gradient, group.staging, hyperparameters=hyperparameters, count=count, scale=scale
            )

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights, over whatever was published there; after `step` or `load` only."""
        self._write()


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """The columns that lie in a tile, relative to its first one, and how many they are. Found on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = torch.tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    return Columns(
        device=columns.device[first:last] - tile.first_column, host=columns.host[first:last] - tile.first_column
    ), last - first
