"""Columns that the device owns: when they are selected and which ones, and the exact fp32 state of their entries, which the device updates
at once.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3); each rank sums over its own rows, and the
sums are added over the ranks. The state here is a copy of the arena's that runs ahead of it; the training thread gathers it where the arena
is exact and the trainer's: behind the jobs of a synchronous step, and behind a flush.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy, DeviceNumber, runtime_of
from lightning_zenflow.core.partition import Tile, column_count
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.kernels.base import Elements, Selection
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.telemetry import Cause

_GATHERED_AT_ONCE = 1 << 20
"""Entries of a tile that are gathered and copied at once, by whole rows: 12 MB of page-locked memory."""


def select_columns(squared_norms: Tensor, topk_ratio: float) -> Tensor:
    """Columns with the largest squared norms, ascending; among equals the first ones: [..., `column_count`], int64. `squared_norms`:
    [..., columns] float32, not negative, finite, the same on every rank.
    """
    columns = squared_norms.shape[-1]
    # Top-k leaves the order of equals open, and all ranks must choose alike: numbers that are never equal, and whose order is that of the
    # norms, then that of the columns. Bits of floats that are not negative are ordered like the floats.
    from_last = torch.arange(columns - 1, -1, -1, dtype=torch.int64, device=squared_norms.device)
    keys = (squared_norms.view(torch.int32).to(torch.int64) << 32) | from_last
    chosen = torch.topk(keys, column_count(columns, topk_ratio), sorted=False).indices
    return chosen.sort().values


class ColumnSquaredNorms:
    """Squared norms of the columns of all matrices in one step, of this rank's rows until they are added over the ranks: `flat`, float32 on
    the device, and views of it, [columns] each.
    """

    def __init__(self, columns: Sequence[int], device: torch.device) -> None:
        self.flat = torch.zeros(sum(columns), dtype=torch.float32, device=device)
        self.of_parameter = _of_parameters(self.flat, columns, columns)


class Selector:
    """Decides, alike on every rank, in which steps columns are measured and which are selected. `columns` has for each parameter its
    `row_length`.

    Attributes:
        epoch: that the next step belongs to.
        owned: positions of the selected columns in `ColumnSquaredNorms.flat`, on the device; None before the first selection.
        owned_norm_share: share of the gradient's squared norm in the columns selected before, or in the first ones, where columns are
            selected; not finite where all gradients are zero.
    """

    def __init__(self, config: ZenFlowConfig, columns: Sequence[int], device: torch.device) -> None:
        self._columns = columns
        self._topk_ratio = config.topk_ratio
        self._by_epoch = config.select_strategy == "epoch"
        # In steps, or epochs; 0: selects once.
        self._interval = 0 if config.select_interval == "auto" else config.select_interval
        self._device = device
        self.epoch = 0
        self.owned_norm_share = DeviceNumber()
        self.start_over()

    def start_over(self) -> None:
        """Forgets all selections."""
        self.owned: Tensor | None = None
        self._next: int | None = 0  # step or epoch of the next selection

    def state_dict(self) -> dict[str, Any]:
        """Columns selected last, and the time of the next selection."""
        return {"owned": None if self.owned is None else self.owned.cpu(), "next": self._next, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.owned = None if state["owned"] is None else state["owned"].to(self._device)
        # Earlier versions selected again with `select_interval: auto`.
        selects_again = self._interval > 0 or self.owned is None
        self._next, self.epoch = state["next"] if selects_again else None, state["epoch"]

    def is_due(self, step: int) -> bool:
        """Whether to select by the gradient of `step`."""
        return self._next is not None and self._now(step) >= self._next

    def new_column_norms(self) -> ColumnSquaredNorms:
        """New sums for one step."""
        return ColumnSquaredNorms(self._columns, self._device)

    def select(self, column_norms: ColumnSquaredNorms, step: int, *, finite: Tensor) -> list[Tensor | None] | None:
        """Chooses columns by the sums of a step, which `finite`, 0-D bool on the device, says is applied. Waits for the device.

        Returns for each parameter its columns, int64 on the CPU, ascending, None standing for all; None if the step is not applied: then
        the next one selects.
        """
        flat = column_norms.flat
        # All matrices of a width at once, since the host takes half a millisecond for each call; one copy brings all to the host.
        chosen, positions = self._largest(flat)
        copied = AsyncHostCopy(torch.cat([finite.long().view(1), chosen])).read()
        if not copied[0].tolist():
            return None
        before = positions if self.owned is None else self.owned
        self.owned_norm_share.copy(flat.index_select(0, before).sum() / flat.sum())
        self.owned = positions
        self._next = self._now(step) + self._interval if self._interval else None
        numbers = [column_count(n, self._topk_ratio) if n else 0 for n in self._columns]
        columns = _of_parameters(copied[1:], self._columns, numbers)
        return [None if k == n else columns[i] for i, (n, k) in enumerate(zip(self._columns, numbers, strict=True))]

    def _largest(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Columns with the largest norms, in the order of `flat`, and their positions in it: int64 on the device."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        columns, positions, begin = [none], [none], 0
        for width, n_matrices in sorted(Counter(self._columns).items()):
            numel = width * n_matrices
            if numel:
                of_width = select_columns(flat.narrow(0, begin, numel).view(n_matrices, width), self._topk_ratio)
                begins = torch.arange(begin, begin + numel, width, dtype=torch.int64, device=self._device)
                columns.append(of_width.view(-1))
                positions.append((of_width + begins.unsqueeze(1)).view(-1))
                begin += numel
        return torch.cat(columns), torch.cat(positions)

    def _now(self, step: int) -> int:
        return self.epoch if self._by_epoch else step


def _of_parameters(flat: Tensor, columns: Sequence[int], numbers: Sequence[int]) -> dict[int, Tensor]:
    """Every parameter's part of `flat`, a view of as many entries as `numbers` says. Matrices of equally many columns are neighbours."""
    order = sorted(range(len(columns)), key=columns.__getitem__)
    return dict(zip(order, torch.split(flat, [numbers[parameter] for parameter in order]), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedTile:
    """Device-owned entries of one tile, [rows, k], which begin at `begin` among those of its group: the parameter group, and the applied
    steps that its parameters have missed.
    """

    tile: Tile
    group: tuple[int, int]
    begin: int
    columns: Tensor | None
    """Int64 on the CPU, relative to the tile's first column; None if all of its columns are owned."""
    k: int


class DeviceColumns:
    """Columns that the device owns, for each slice over the whole row, as of `Selector.select`; and the tensors of their entries: 12 bytes
    an entry, and the gradient in the model's type. Entries of one parameter group whose parameters have been frozen for as many steps have
    one array, and AdamW is one call for it. Slices that are not trained own none.

    Attributes:
        numel: number of entries.
        selections: for each tile with such columns, what AdamW needs of its gradient.
    """

    def __init__(self, rank: RankState, columns: Sequence[Tensor | None]) -> None:
        partition = rank.partition
        self._rank = rank
        kinds = {index: (partition.slices[index].param_group, n) for index, n in rank.trained.items()}
        self.columns = columns
        numels = dict.fromkeys(sorted(set(kinds.values())), 0)
        self._tiles: dict[int, OwnedTile] = {}  # by number
        for number, tile in enumerate(partition.tiles):
            of_tile, k = _within(columns[tile.slice], tile, partition.slices[tile.slice].columns)
            # All of a resident block is updated at once.
            if tile.slice in kinds and k > 0 and rank.blocks.of_tile[number].resident is None:
                group = kinds[tile.slice]
                self._tiles[number] = OwnedTile(tile=tile, group=group, begin=numels[group], columns=of_tile, k=k)
                numels[group] += tile.rows * k
        self.numel = sum(numels.values())
        # The weights take the place of the gradient, from `step` or `load` to the next gradient. An array for each group.
        self._elements: dict[tuple[int, int], Elements] = {}
        for group, n in numels.items():
            state = torch.empty(3, n, dtype=torch.float32, device=rank.device)
            staging = torch.empty(n, dtype=rank.dtype, device=rank.device)
            self._elements[group] = Elements.of(state, staging, staging)
        self.selections: dict[int, Selection] = {}
        writes: list[tuple[Tensor, Selection]] = []
        for number, owned in self._tiles.items():
            tile = owned.tile
            on_device = None if owned.columns is None else owned.columns.to(rank.device, non_blocking=True)
            staging = self._elements[owned.group].gradient
            entries = staging.narrow(0, owned.begin, tile.rows * owned.k).view(tile.rows, owned.k)
            matrix = rank.weights_at(owned.group[0], tile.begin, tile.numel).view(tile.rows, tile.width)
            self.selections[number] = selection = Selection(columns=on_device, entries=entries)
            writes.append((matrix, selection))
        self._write = rank.kernels.column_writer(writes)

    def load(self, cause: Cause) -> None:
        """Gathers the exact state of the entries from the arena, with all of torch's threads; behind a flush or synchronous jobs."""
        rank = self._rank
        assert not any(block.window or block.jobs for block in rank.blocks), "the arena is exact, and the trainer's"
        with rank.telemetry.measure(cause):
            for owned in self._tiles.values():
                n_rows = max(1, _GATHERED_AT_ONCE // owned.k)
                for row in range(0, owned.tile.rows, n_rows):
                    part = self._gather(owned, row, min(n_rows, owned.tile.rows - row))
                    state = self._elements[owned.group].state
                    to = state.narrow(1, owned.begin + row * owned.k, part.shape[1])
                    for array, values in zip(to, part, strict=True):
                        array.copy_(values, non_blocking=True)
                    rank.telemetry.h2d_bytes += part.nbytes
            for elements in self._elements.values():
                elements.weights.copy_(elements.state[0])
                elements.done.zero_()

    def _gather(self, owned: OwnedTile, row: int, n_rows: int) -> Tensor:
        """Entries of some rows, [3, n_rows * k] float32, page-locked."""
        width = owned.tile.width
        part = runtime_of(self._rank.device).empty_on_host((3, n_rows * owned.k), torch.float32)
        begin = owned.tile.begin + row * width
        for array, to in zip(self._rank.arena.states, part, strict=True):
            if owned.columns is None:
                to.copy_(array.read(begin, n_rows * width))
            else:
                to.view(n_rows, owned.k).copy_(array.read_columns(begin, n_rows, width, owned.columns))
        return part

    def step(self, number: int, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every entry; `groups` are hyperparameters of each parameter group."""
        for (param_group, n_missed), elements in self._elements.items():
            if elements.gradient.numel():
                self._rank.kernels.adamw_(elements, groups[param_group], scale.without(n_missed), number)

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
        self.clear()

    def clear(self) -> None:
        """Makes nothing device-owned."""
        self.current: DeviceColumns | None = None
        self.selections: Mapping[int, Selection] = {}

    def take(self, columns: Sequence[Tensor | None], cause: Cause) -> None:
        """Makes other columns device-owned, for each slice over the whole row or None for all; behind a flush or synchronous jobs."""
        # First: both at once would take twice the memory.
        self.clear()
        taken = DeviceColumns(self._rank, columns)
        taken.load(cause)
        # Last: behind an interruption nothing writes what is half there.
        self.current, self.selections = taken, taken.selections

    def follow_owners(self) -> None:
        """Leaves out the columns of resident blocks, and takes those of others, right behind a flush."""
        if self.current is not None:
            self.take(self.current.columns, "select")

    def reload(self) -> None:
        """Gathers the state of every entry and writes its weight, after a flush."""
        if self.current is not None:
            self.current.load("flush")
            self.current.write_weights()

    def state_dict(self) -> dict[str, Any]:
        """The columns; the values of their entries are the arena's, right after a flush."""
        columns = {} if self.current is None else {1: list(self.current.columns)}
        # Earlier versions had a selection for each block.
        of_block = [next(iter(columns), None)] * len(self._rank.blocks)
        return {"of_block": of_block, "wanted": of_block, "selections": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values are gathered from the arena. All blocks follow a change of columns of an earlier version."""
        self.clear()
        if (number := next(iter(state["wanted"]), None)) is not None:
            self.take(state["selections"][number], "flush")


def _within(columns: Tensor | None, tile: Tile, row_length: int) -> tuple[Tensor | None, int]:
    """Columns that lie in a tile, relative to its first one, and their number: a range of sorted numbers."""
    if columns is None or tile.width == row_length:
        return columns, tile.width if columns is None else columns.numel()
    first, last = torch.searchsorted(columns, columns.new_tensor([0, tile.width]) + tile.first_column).tolist()
    return columns[first:last] - tile.first_column, last - first
