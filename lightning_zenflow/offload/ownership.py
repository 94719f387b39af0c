"""Columns that the device owns: when columns are selected, and which ones; their ownership by blocks, which changes while training goes on;
and the record of the parameters that are trained, with the steps in which they were.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3). Partitions hold row ranges, so each rank
sums over its own rows, and the sums are added over the ranks: one float per column instead of the gradient itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy, DeviceNumber
from lightning_zenflow.core.partition import Partition, column_count
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.offload.columns import Columns, DeviceColumns, ExportRegion, Grouping, adamw, region_sizes
from lightning_zenflow.offload.rank_state import Block, Owned, RankState

AUTO_INTERVAL = 512
"""Steps between two selections of `select_interval: auto`. Selecting again makes no measurable difference (docs/convergence.md)."""


def select_columns(squared_norms: Tensor, topk_ratio: float) -> Tensor:
    """Columns with the largest squared norms, in ascending order; among equals the first ones.

    Args:
        squared_norms: [..., columns] float32, not negative, finite, the same on every rank.
        topk_ratio: share of the columns, 0 to 1.

    Returns:
        [..., `column_count`], int64, on the device of `squared_norms`.
    """
    columns = squared_norms.shape[-1]
    # Top-k leaves the order of equals open, and all ranks must choose alike: numbers that are never equal, and whose order is that of the
    # norms, then that of the columns. Bits of floats that are not negative are ordered like the floats.
    from_last = torch.arange(columns - 1, -1, -1, dtype=torch.int64, device=squared_norms.device)
    keys = (squared_norms.view(torch.int32).to(torch.int64) << 32) | from_last
    chosen = torch.topk(keys, column_count(columns, topk_ratio), sorted=False).indices
    return chosen.sort().values


class ColumnSquaredNorms:
    """Column proxies of all matrices of the model (`Selector`); one all-reduce adds them over the ranks."""

    def __init__(self, columns: Sequence[int], device: torch.device) -> None:
        self.flat = torch.zeros(sum(columns), dtype=torch.float32, device=device)
        """float32; of this rank's rows until it is reduced."""
        self.of_parameter = _of_parameters(self.flat, columns, columns)
        """[columns] each, views."""


class Selector:
    """Decides, alike on every rank, in which steps proxies are measured and which columns are selected.

    Args:
        columns: for each parameter of the model, the length of a row of its [out, rest] view; 0 where it has no columns to choose from.
        topk_ratio: share of the columns.
        by_epoch: whether `interval` counts epochs instead of steps.
        interval: steps or epochs between selections; 0 selects once; "auto" is every epoch, or every `AUTO_INTERVAL` steps.

    Attributes:
        epoch: that the next step belongs to.
        owned: positions of the selected columns in `ColumnSquaredNorms.flat`, on the device; None before the first selection.
        owned_norm_share: share of the squared norm of the gradient that lies in device-owned columns, copied where it is measured.
    """

    def __init__(
        self,
        columns: Sequence[int],
        *,
        topk_ratio: float,
        by_epoch: bool,
        interval: int | Literal["auto"],
        device: torch.device,
    ) -> None:
        self._columns = columns
        self._topk_ratio = topk_ratio
        self._by_epoch = by_epoch
        self._interval = (1 if by_epoch else AUTO_INTERVAL) if interval == "auto" else interval
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
        self._next, self.epoch = state["next"], state["epoch"]

    def is_due(self, step: int) -> bool:
        """Whether to select by the gradient of `step`."""
        return self._next is not None and self._now(step) >= self._next

    def new_column_norms(self) -> ColumnSquaredNorms:
        """New sums for the proxies of one step."""
        return ColumnSquaredNorms(self._columns, self._device)

    def select(
        self, column_norms: ColumnSquaredNorms, step: int, *, finite: Tensor
    ) -> tuple[list[Columns | None], Tensor] | None:
        """Chooses columns by reduced proxies of a step, which `finite`, 0-D bool on the device, says is applied. Waits for the device.

        Returns:
            None if the step is not applied; then the next one selects. Else for each parameter its columns, None standing for all; and
            the share of the gradient's squared norm in the columns that were selected before, or in these if they are the first ones: 0-D
            float32 on the device, not finite where all gradients are zero.
        """
        flat = column_norms.flat
        # On the device, all matrices of a width at once: a large model has hundreds, and the host takes half a millisecond for each. One
        # copy brings to the host all that it needs.
        chosen, positions = self._largest(flat)
        copied = AsyncHostCopy(torch.cat([finite.long().view(1), chosen])).read()
        if not copied[0].tolist():
            return None
        share = flat.index_select(0, positions if self.owned is None else self.owned).sum() / flat.sum()
        self.owned = positions
        self._next = self._now(step) + self._interval if self._interval else None
        numbers = [column_count(n, self._topk_ratio) if n else 0 for n in self._columns]
        host, device = (_of_parameters(values, self._columns, numbers) for values in (copied[1:], chosen))
        selected = [
            None if k == n else Columns(device=device[parameter], host=host[parameter])
            for parameter, (n, k) in enumerate(zip(self._columns, numbers, strict=True))
        ]
        return selected, share

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
    """Every parameter's part of `flat`, a view of as many entries as `numbers` says.

    Matrices with equally many columns lie beside each other, so that one call works on all.
    """
    order = sorted(range(len(columns)), key=columns.__getitem__)
    return dict(zip(order, torch.split(flat, [numbers[parameter] for parameter in order]), strict=True))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parameters are trained between two changes of that, each list in the order in which `Slice.parameter` counts them."""

    flags: list[bool]
    """Whether it is trained."""
    since: int
    """Applied steps of the run before."""
    counts: list[int]
    """Those in which it was trained."""

    @property
    def n_missed(self) -> list[int | None]:
        """Applied steps of the run that AdamW's own count lacks; None of a frozen parameter, whose count stands still."""
        return [self.since - n if is_trained else None for is_trained, n in zip(self.flags, self.counts, strict=True)]


class Freezing:
    """Record of the parameters that are trained at present. As under plain torch, a frozen parameter and its moments do not change, and
    AdamW's step count, which its bias correction depends on, is each parameter's own.

    Args:
        parameters: parameters of the model that required gradients at setup, by name, in the order in which `Slice.parameter` counts them.

    Attributes:
        now: which are trained, as everything else follows it.
    """

    def __init__(self, partition: Partition, parameters: Mapping[str, Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self.now = Trained(flags=[True] * len(parameters), since=0, counts=[0] * len(parameters))

    def present(self) -> list[bool]:
        """What `Trained.flags` should be by `requires_grad`, alike on every rank."""
        return [p.requires_grad for p in self._parameters.values()]

    def counts(self, count: int) -> dict[str, int]:
        """AdamW's own count of each parameter by name, after `count` applied steps of the run."""
        now = self.now
        own = (n + is_trained * (count - now.since) for is_trained, n in zip(now.flags, now.counts, strict=True))
        return dict(zip(self._parameters, own, strict=True))

    def trained(self, flags: list[bool], counts: Mapping[str, int] | None, count: int) -> Trained:
        """What is trained from `count` applied steps on. `counts` are as above, those of the run where missing; None: of this run."""
        own = self.counts(count) if counts is None else counts
        return Trained(flags=flags, since=count, counts=[own.get(name, count) for name in self._parameters])

    def slices(self, trained: Trained) -> dict[int, int]:
        """Slices of the parameters that are trained, each with the steps that it has missed."""
        n_missed = trained.n_missed
        of_slices = enumerate(n_missed[s.parameter] for s in self._partition.slices)
        return {index: n for index, n in of_slices if n is not None}

    def of_slices(self, columns: Sequence[Columns | None] | None) -> list[Columns | None]:
        """For each slice the columns of its parameter; no columns where it is frozen.

        Args:
            columns: for each parameter, columns over the whole row, None for all; or None, for no columns of any parameter.
        """
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        none = Columns(device=empty.to(next(iter(self._parameters.values())).device), host=empty)
        numbers = [s.parameter for s in self._partition.slices]
        return [none if columns is None or not self.now.flags[number] else columns[number] for number in numbers]


class Ownership:
    """Owner of all device-owned entries of a rank: 12 bytes an entry, and the gradient in the model's type.

    Each block has a segment of each group's arrays (`Grouping`), as long as what it can own at most. What is unused is zero, or of columns
    before, and AdamW passes over it. So AdamW is one call for a group, and the write of the weights one for the rank, whatever the number
    of blocks.

    A new selection reaches each block at that block's own window boundary, in two phases:

    1. *submit*: the window closes. The worker exports the exact state of the new columns behind the window's job. From the next step on,
       their gradients are gathered beside those of the old ones.
    2. *publish*: the job is done. The exported state is loaded, and the d steps since then are applied to it. The old columns need nothing:
       their exact state is in the arena as well.

    Nothing is reset, dropped or applied twice.

    Args:
        topk_ratio: largest share of the columns that is selected.

    Attributes:
        selections: by number, for each slice columns over the whole row, None for all; while there are none, nothing is owned.
    """

    def __init__(self, rank: RankState, *, topk_ratio: float) -> None:
        self._rank = rank
        self._sizes = region_sizes(rank.partition, topk_ratio)
        begins = accumulate((size.n_bytes for size in self._sizes), initial=0)
        places = zip(begins, self._sizes, strict=False)
        self._regions = [ExportRegion(rank, begin=begin, size=size) for begin, size in places]
        # For each group [3, n] float32 and [n] in the model's type (`DeviceColumns`), while columns are owned.
        self._states: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._write: Callable[[], None] | None = None  # made anew when blocks have changed their columns
        self.selections: dict[int, Sequence[Columns | None]] = {}
        self.follow(dict.fromkeys(range(len(rank.partition.slices)), 0))

    def follow(self, slices: Mapping[int, int]) -> None:
        """Makes nothing device-owned, and later entries of these slices only, each with the applied steps that it has missed."""
        self.clear()
        self._grouping = Grouping.of(self._rank.partition, slices)
        # For each group the entries of each block.
        self._numels = [[0] * len(self._sizes) for _ in self._grouping.groups]
        for block, size in enumerate(self._sizes):
            for index in size.of_slices.keys() & slices.keys():
                self._numels[self._grouping.of_slice[index]][block] += size.of_slices[index]

    @property
    def numel(self) -> int:
        """Number of device-owned entries on this rank."""
        return sum(columns.numel for columns in self._current)

    @property
    def _current(self) -> list[DeviceColumns]:
        return [block.owned.current for block in self._rank.blocks if block.owned.current is not None]

    def select(self, columns: Sequence[Columns | None]) -> None:
        """Makes every block change to these columns, for each slice over the whole row or None for all, at its next window boundary."""
        number = max(self.selections, default=0) + 1
        self.selections[number] = columns
        for block in self._rank.blocks:
            block.owned.wanted = number
        # No block has or changes to the others any more.
        in_use = {number for block in self._rank.blocks for number in (block.owned.wanted, block.owned.selection)}
        self.selections = {number: columns for number, columns in self.selections.items() if number in in_use}

    def clear(self) -> None:
        """Makes nothing device-owned."""
        # First: behind an interruption nothing writes what is half gone.
        self._write = None
        for block in self._rank.blocks:
            block.owned = Owned()
        self.selections.clear()
        self._states, self._staging = [], []

    def submitted(self, blocks: Iterable[Block]) -> None:
        """Phase *submit* for blocks whose window has just closed."""
        for block in (block for block in blocks if block.changes_columns):
            owned = block.owned
            assert owned.wanted is not None
            states, staging = self._segments(block)
            # The segment's own has gradients of the present columns.
            columns = self._columns_of(block, owned.wanted, states, [torch.zeros_like(t) for t in staging])
            columns.request("select")
            owned.incoming, owned.selection = columns, owned.wanted

    def published(self, blocks: Iterable[Block]) -> None:
        """Phase *publish* for blocks whose job is done; no other job of theirs may be in flight."""
        for block in blocks:
            if (incoming := block.owned.incoming) is not None:
                self._settle(block, incoming)
                incoming.load("select")
        changes = (block.owned.incoming or block.changes_columns for block in self._rank.blocks)
        if not any(columns.numel for columns in self._current) and not any(changes):
            # All columns have been given up.
            self.clear()

    def reload(self) -> None:
        """Copies the state of every entry from the arena, after a flush; pending changes of columns are complete then."""
        for block in self._rank.blocks:
            if (incoming := block.owned.incoming) is not None:
                self._settle(block, incoming)
        # The worker exports one block while the device copies another.
        current = self._current
        for columns in current:
            columns.request("flush")
        for columns in current:
            columns.load("flush")

    def step(self, groups: Sequence[GroupHyperparameters], scale: StepScale) -> None:
        """One exact AdamW step of every owned entry; columns to come record it."""
        if self._current:
            adamw(self._rank, self._grouping.groups, self._states, self._staging, self._staging, groups, scale)
        for block in self._rank.blocks:
            if (incoming := block.owned.incoming) is not None:
                incoming.record(groups, scale)

    def write_weights(self) -> None:
        """Writes the owned entries into the model's weights, over published ones."""
        if self._write is None:
            writes = [write for columns in self._current for write in columns.writes]
            self._write = self._rank.kernels.column_writer(writes)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Present and coming columns of every block, right after a flush; their values are the arena's."""
        return {
            "of_block": [block.owned.selection for block in self._rank.blocks],
            "wanted": [block.owned.wanted for block in self._rank.blocks],
            "selections": {
                number: [None if c is None else c.host for c in selection]
                for number, selection in self.selections.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values are loaded from the arena."""
        self.clear()
        self.selections = {
            number: [None if c is None else Columns(device=c.to(self._rank.device), host=c) for c in selection]
            for number, selection in state["selections"].items()
        }
        for block, selection, wanted in zip(self._rank.blocks, state["of_block"], state["wanted"], strict=True):
            current = None if selection is None else self._columns_of(block, selection, *self._segments(block))
            block.owned = Owned(wanted=wanted, selection=selection, current=current)
        self.reload()

    def _settle(self, block: Block, incoming: DeviceColumns) -> None:
        """Makes columns to come a block's present ones, in its segment; their state is to be loaded."""
        _, staging = self._segments(block)
        incoming.gather_into(staging)
        self._write = None
        block.owned.current, block.owned.incoming = incoming, None

    def _segments(self, block: Block) -> tuple[list[Tensor], list[Tensor]]:
        """The block's segments of states and staging, for each group; makes the arrays first if there are none."""
        if not self._states:
            numels = [sum(of_blocks) for of_blocks in self._numels]
            self._staging = [self._rank.weights[0].new_zeros(n) for n in numels]
            self._states = [torch.zeros(3, n, dtype=torch.float32, device=self._rank.device) for n in numels]
        places = list(zip(self._states, self._staging, self._numels, strict=True))
        states = [torch.split(state, of_blocks, dim=1)[block.number] for state, _, of_blocks in places]
        return states, [torch.split(staging, of_blocks)[block.number] for _, staging, of_blocks in places]

    def _columns_of(
        self, block: Block, selection: int, states: Sequence[Tensor], staging: Sequence[Tensor]
    ) -> DeviceColumns:
        columns, region = self.selections[selection], self._regions[block.number]
        return DeviceColumns(self._rank, block.number, columns, region, self._grouping, states=states, staging=staging)
