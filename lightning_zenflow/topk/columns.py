"""Device-owned entries of one block: exact fp32 state that the device updates at once.

The arena alone is AdamW's exact state: the worker replays *every* element, the selected columns too (they are scattered over the rows, so
leaving them out would save no memory traffic). The state here is a copy of the selected entries that runs ahead of the arena: it is
updated in the step itself instead of up to S + d - 1 steps later. Therefore a new selection moves nothing back to the host, and a flush
ends with `DeviceColumns.request` and `DeviceColumns.load`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Tile
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import ColumnWrite, Selection
from lightning_zenflow.telemetry.telemetry import Cause
from lightning_zenflow.topk.state_export import Columns, ExportRegion, OwnedTile
from lightning_zenflow.worker.rank_state import RankState


class DeviceColumns:
    """Owner of the device's copy of one block's selected entries: 12 bytes an entry, and the gradient in the model's type.

    Args:
        block: index into `Partition.blocks`.
        columns: for each slice, the device-owned columns over the whole row; None where the device owns all of them.
        source: where their exact state comes from.

    Attributes:
        write_weights: writes the entries into the model's weights, over published ones; after `step` or `load` only.
    """

    def __init__(self, rank: RankState, block: int, columns: Sequence[Columns | None], source: ExportRegion) -> None:
        partition = rank.partition
        self._rank = rank
        self._source = source
        tiles: dict[int, OwnedTile] = {}
        numel = [0] * len(partition.group_begins)
        for tile_index in partition.blocks[block].tiles:
            tile = partition.tiles[tile_index]
            of_tile, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            if k > 0:
                group = partition.slices[tile.slice].param_group
                tiles[tile_index] = OwnedTile(
                    tile=tile, number=tile_index, param_group=group, begin=numel[group], columns=of_tile, k=k
                )
                numel[group] += tiles[tile_index].numel
        self._tiles = list(tiles.values())
        # For each parameter group, master weights and moments of its n owned entries: [3, n] float32.
        self._states = [torch.empty(3, n, dtype=torch.float32, device=rank.device) for n in numel]
        # [n], model dtype: the step's gradient, filled as it arrives; after `step` or `load` the new weights, until the next gradient.
        self._staging = [weights.new_zeros(n) for n, weights in zip(numel, rank.weights, strict=True)]
        # Built once, because every step uses them.
        self._selections: dict[int, Selection] = {}
        writes = []
        for tile_index, owned in tiles.items():
            tile, on_device = owned.tile, None if owned.columns is None else owned.columns.device
            staging = owned.of_group(self._staging[owned.param_group])
            matrix = rank.weights_at(owned.param_group, tile.begin, tile.numel).view(tile.rows, tile.width)
            self._selections[tile_index] = Selection(columns=on_device, target=staging)
            writes.append(ColumnWrite(matrix=matrix, columns=on_device, selected=staging))
        self.write_weights = rank.kernels.column_writer(writes)

    @property
    def numel(self) -> int:
        """Number of device-owned entries of this block."""
        return sum(staging.numel() for staging in self._staging)

    def request(self, cause: Cause) -> None:
        """Makes the worker export the entries' exact state, as it is after the block's last job; no other job of it before `load`.

        Args:
            cause: of a wait for an earlier request.
        """
        self._source.request(self._tiles, cause)

    def load(self, cause: Cause) -> None:
        """Takes over the requested state, in stream order. A stall only if the worker has not exported it yet."""
        self._source.load(self._tiles, self._states, cause)
        for state, staging in zip(self._states, self._staging, strict=True):
            staging.copy_(state[0])

    def selection(self, tile_index: int) -> Selection | None:
        """Columns of a tile's gradient that `step` needs, and their destination; None if there are none."""
        return self._selections.get(tile_index)

    def gradients(self) -> list[Tensor]:
        """Copy of the gathered gradients of each parameter group, for a later `step`."""
        return [staging.clone() for staging in self._staging]

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
        gradients = self._staging if gradients is None else gradients
        for state, gradient, staging, group in zip(self._states, gradients, self._staging, groups, strict=True):
            if staging.numel():
                self._rank.kernels.adamw_(state, gradient, staging, group, scale)


def _within(columns: Columns | None, tile: Tile, row_length: int) -> tuple[Columns | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number. Computed on the host: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.host.numel()
    bounds = columns.host.new_tensor([tile.first_column, tile.first_column + tile.width])
    first, last = torch.searchsorted(columns.host, bounds).tolist()
    device, host = (of_row[first:last] - tile.first_column for of_row in (columns.device, columns.host))
    return Columns(device=device, host=host), last - first
