"""The entries that the device owns: exact fp32 state on the device, updated at once.

The host arena stays complete: the worker replays *every* element, these too (selected columns are scattered over the rows, so leaving them
out would save no memory traffic), hence the arena alone is the exact AdamW state. What is held here is a copy of the selected
entries that runs ahead of it, updated at once instead of up to S + d steps later. That is why selection moves nothing back to
the host, and why a flush ends with `load`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.adamw import adamw_step_
from lightning_zenflow.arena import Arena
from lightning_zenflow.clipping import StepScale
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.partition import Partition, Tile


@dataclass(frozen=True, kw_only=True)
class _Owned:
    """The selected entries of one tile: rectangle [rows, k] at `begin` in the flat state of the tile's parameter group."""

    tile: Tile
    param_group: int
    begin: int
    columns: Tensor | None
    """[k] int64, relative to the tile's first column; None if all of its columns are owned."""
    k: int

    @property
    def numel(self) -> int:
        return self.tile.rows * self.k

    def of_tile(self, values: Tensor) -> Tensor:
        """The owned entries of the tile's values, [rows * width] -> [rows, k]."""
        rectangle = values.view(self.tile.rows, self.tile.width)
        return rectangle if self.columns is None else rectangle.index_select(1, self.columns)

    def of_state(self, state: Tensor) -> Tensor:
        """The tile's part of the group's flat state as [rows, k], a view."""
        return state.narrow(0, self.begin, self.numel).view(self.tile.rows, self.k)


@dataclass(frozen=True, kw_only=True)
class _GroupState:
    """Flat state of one parameter group's owned entries."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    """Model dtype; filled as the step's gradients arrive."""


class DeviceColumns:
    """Owner of the device's copy of the selected entries.

    Args:
        partition: the rank's partition.
        columns: for each slice, the columns that the device owns (int64, ascending, on the device), over the whole row; None where it
            owns all of them, an empty tensor where it owns none.
        device: where the copy lives.
        dtype: the model's type, for gradients.
    """

    def __init__(
        self, partition: Partition, columns: Sequence[Tensor | None], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._by_slice: list[list[_Owned]] = [[] for _ in partition.slices]
        self._group_begins = partition.group_begins
        self._dtype = dtype
        numel = [0] * len(partition.group_begins)
        for tile in partition.tiles:
            mine = columns[tile.slice]
            k = tile.width
            if mine is not None:
                # One tile's columns are a piece of the row at most; the bounds are found on the host, once per selection.
                mine = mine[(mine >= tile.first_column) & (mine < tile.first_column + tile.width)] - tile.first_column
                k = mine.numel()
            if k == 0:
                continue
            param_group = partition.slices[tile.slice].param_group
            owned = _Owned(tile=tile, param_group=param_group, begin=numel[param_group], columns=mine, k=k)
            numel[param_group] += owned.numel
            self._by_slice[tile.slice].append(owned)
        self._states = [
            _GroupState(
                master=torch.empty(n, device=device),
                exp_avg=torch.empty(n, device=device),
                exp_avg_sq=torch.empty(n, device=device),
                gradient=torch.zeros(n, device=device, dtype=dtype),
            )
            for n in numel
        ]

    @property
    def numel(self) -> int:
        """Entries that the device owns on this rank."""
        return sum(state.master.numel() for state in self._states)

    def load(self, arena: Arena) -> None:
        """Takes the entries' exact state from the arena. No round may be in flight. Waits for the device: not for every step."""
        for owned in self._all():
            state = self._states[owned.param_group]
            for ours, theirs in (
                (state.master, arena.master),
                (state.exp_avg, arena.exp_avg),
                (state.exp_avg_sq, arena.exp_avg_sq),
            ):
                values = theirs.narrow(0, owned.tile.begin, owned.tile.numel).view(owned.tile.rows, owned.tile.width)
                if owned.columns is not None:
                    values = values.index_select(1, owned.columns.cpu())
                owned.of_state(ours).copy_(values)

    def gather_gradient(self, slice_index: int, begin: int, gradient: Tensor | None) -> None:
        """Keeps the owned entries of a slice's gradient; None stands for zeros.

        Args:
            slice_index: index into `Partition.slices`.
            begin: the slice's first element in the partition.
            gradient: [slice.numel], model dtype.
        """
        for owned in self._by_slice[slice_index]:
            target = owned.of_state(self._states[owned.param_group].gradient)
            if gradient is None:
                target.zero_()
            else:
                target.copy_(owned.of_tile(gradient.narrow(0, owned.tile.begin - begin, owned.tile.numel)))

    def step(self, groups: Sequence[GroupHyperparameters], count: Tensor, scale: StepScale) -> None:
        """One exact AdamW step of every owned entry with the gathered gradients."""
        for state, hyperparameters in zip(self._states, groups, strict=True):
            if state.master.numel():
                adamw_step_(
                    state.master,
                    state.exp_avg,
                    state.exp_avg_sq,
                    state.gradient,
                    hyperparameters=hyperparameters,
                    count=count,
                    factor=scale.factor,
                    finite=scale.finite,
                )

    def write_weights(self, weights: Sequence[Tensor]) -> None:
        """Writes the owned entries into the model's weights, over whatever was published there.

        Args:
            weights: for each parameter group, the rank's flat partition of the model's weights.
        """
        for owned in self._all():
            tile = owned.tile
            target = weights[owned.param_group].narrow(
                0, tile.begin - self._group_begins[owned.param_group], tile.numel
            )
            rectangle = target.view(tile.rows, tile.width)
            values = owned.of_state(self._states[owned.param_group].master)
            if owned.columns is None:
                rectangle.copy_(values)
            else:
                rectangle.index_copy_(1, owned.columns, values.to(self._dtype))

    def _all(self) -> Iterable[_Owned]:
        return (owned for slice_entries in self._by_slice for owned in slice_entries)
