"""When columns are selected, and which ones: those with the largest squared norms of their gradient. And which parameters are trained.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3). Partitions hold row ranges, so each rank
sums over its own rows, and the sums are added over the ranks: one float per column instead of the gradient itself.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.core.partition import Partition, column_count, merge_ranges
from lightning_zenflow.offload.columns import Columns

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
    """Column proxies of all matrices of the model; one all-reduce adds them over the ranks.

    Args:
        columns: see `Selector`.
        device: the training device.
    """

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
        self.start_over()

    @property
    def has_selected(self) -> bool:
        """Whether columns have been selected since the start."""
        return self._owned is not None

    def start_over(self) -> None:
        """Forgets all selections."""
        # Positions of the selected columns in `ColumnSquaredNorms.flat`, on the device; step or epoch of the next selection.
        self._owned: Tensor | None = None
        self._next: int | None = 0

    def state_dict(self) -> dict[str, Any]:
        """Columns selected last, and the time of the next selection."""
        return {"owned": None if self._owned is None else self._owned.cpu(), "next": self._next, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._owned = None if state["owned"] is None else state["owned"].to(self._device)
        self._next, self.epoch = state["next"], state["epoch"]

    def is_due(self, step: int) -> bool:
        """Whether to select by the gradient of `step`."""
        return self._next is not None and self._now(step) >= self._next

    def new_column_norms(self) -> ColumnSquaredNorms:
        """New sums for the proxies of one step."""
        return ColumnSquaredNorms(self._columns, self._device)

    def select(self, column_norms: ColumnSquaredNorms, step: int) -> tuple[list[Columns | None], Tensor] | None:
        """Chooses columns by reduced proxies. Waits for the device.

        Returns:
            None if the gradient was not finite; then the next step selects. Else for each parameter its columns, None standing for all; and
            the share of the gradient's squared norm in the columns that were selected before, or in these if they are the first ones: 0-D
            float32 on the device, not finite where all gradients are zero.
        """
        flat = column_norms.flat
        # On the device, all matrices of a width at once: a large model has hundreds, and the host takes half a millisecond for each. One
        # copy brings to the host all that it needs.
        chosen, positions = self._largest(flat)
        copied = AsyncHostCopy(torch.cat([torch.isfinite(flat).all().long().view(1), chosen])).read()
        if not copied[0].tolist():
            return None
        share = flat.index_select(0, positions if self._owned is None else self._owned).sum() / flat.sum()
        self._owned = positions
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
    """Every parameter's part of `flat`, a view. Matrices with equally many columns lie beside each other, so that one call works on all.

    Args:
        flat: entries of all parameters.
        columns: of each parameter.
        numbers: of entries of each parameter.
    """
    order = sorted(range(len(columns)), key=columns.__getitem__)
    return dict(zip(order, torch.split(flat, [numbers[parameter] for parameter in order]), strict=True))


class Freezing:
    """Record of the parameters that are trained at present. As under plain torch, a frozen parameter and its moments do not change.

    Args:
        parameters: parameters of the model that required gradients at setup, in the order in which `Slice.parameter` counts them.

    Attributes:
        trained: for each parameter, whether it is trained, as of the last `update`.
    """

    def __init__(self, partition: Partition, parameters: Sequence[Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self.trained = self._followed = [True] * len(parameters)

    def update(self, trained: Sequence[bool] | None = None) -> bool:
        """Reads `requires_grad` again, or takes other flags; returns whether they have changed since `followed`, alike on every rank."""
        self.trained = [p.requires_grad for p in self._parameters] if trained is None else list(trained)
        return self.trained != self._followed

    def followed(self) -> None:
        """Notes that everything follows the present flags."""
        self._followed = self.trained

    def parameter_of(self, slice_index: int) -> Tensor:
        """The parameter that a slice is a part of."""
        return self._parameters[self._partition.slices[slice_index].parameter]

    def trained_slices(self) -> list[int]:
        """Slices that are not frozen, ascending."""
        return [index for index, s in enumerate(self._partition.slices) if self.trained[s.parameter]]

    def trained_part(self) -> Partition:
        """Partition with the ranges of trained parameters only."""
        trained = [self._partition.slices[index] for index in self.trained_slices()]
        return dataclasses.replace(self._partition, ranges=tuple(merge_ranges(trained)))

    def no_columns(self) -> list[Columns]:
        """For each parameter, no column."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return [Columns(device=none.to(p.device), host=none) for p in self._parameters[:1]] * len(self._parameters)

    def of_slices(self, columns: Sequence[Columns | None] | None = None) -> list[Columns | None]:
        """For each slice the columns of its parameter; no columns where it is frozen.

        Args:
            columns: for each parameter, columns over the whole row; None, alone or in their place: all.
        """
        columns, none = columns or [None] * len(self._parameters), self.no_columns()
        return [(columns if self.trained[s.parameter] else none)[s.parameter] for s in self._partition.slices]
