"""Columns that the device owns: when they are selected, and which ones.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3). Partitions hold row ranges, so each rank
sums over its own rows, and the sums are added over the ranks: one float per column instead of the gradient itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy, DeviceNumber
from lightning_zenflow.core.partition import column_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one matrix, on the device and on the host."""

    device: Tensor
    """int64, ascending."""
    host: Tensor
    """The same values on the CPU."""


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
        interval: steps or epochs between selections; 0 selects once.

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
        interval: int,
        device: torch.device,
    ) -> None:
        self._columns = columns
        self._topk_ratio = topk_ratio
        self._by_epoch = by_epoch
        self._interval = interval
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
