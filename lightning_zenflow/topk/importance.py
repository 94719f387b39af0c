"""Importance of columns, and the top-k choice. Pure functions.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3). Partitions hold row ranges, so each rank
sums over its own rows, and the sums are added over the ranks: one float per column instead of the gradient itself.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def column_count(columns: int, topk_ratio: float) -> int:
    """Number of device-owned columns of a matrix: the nearest integer to the share, at least one unless the share is 0."""
    return 0 if topk_ratio == 0 else max(1, round(topk_ratio * columns))


def select_columns(squared_norms: Tensor, topk_ratio: float) -> Tensor:
    """Columns with the largest squared norms, in ascending order; among equals the first ones.

    Args:
        squared_norms: [columns], finite, the same on every rank.
        topk_ratio: share of the columns, 0 to 1.

    Returns:
        [`column_count`], int64, on the device of `squared_norms`.
    """
    # A stable sort, because top-k leaves the order of equals open and all ranks must choose alike.
    order = torch.argsort(squared_norms, descending=True, stable=True)
    return torch.sort(order[: column_count(squared_norms.numel(), topk_ratio)]).values


def overlap(current: Sequence[Tensor], fresh: Sequence[Tensor]) -> float:
    """Share of the freshly chosen columns that were chosen before, over all matrices; 1 if there are none.

    Args:
        current: for each matrix, column numbers, int64.
        fresh: the same, of the new choice.
    """
    total = sum(f.numel() for f in fresh)
    kept = sum(int(torch.isin(f, c).sum()) for c, f in zip(current, fresh, strict=True))
    return kept / total if total else 1.0


def owned_norm_share(column_norms: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
    """Share of the squared norm of all matrices' gradients that lies in device-owned columns.

    Args:
        column_norms: for each matrix, sums of squares of its columns, float32, on the device.
        owned: for each matrix, the device-owned columns, int64, on the device.

    Returns:
        0-D float32 on the device; not finite where the gradients are not, or are all zero.
    """
    at_once = torch.cat([e.index_select(0, columns) for e, columns in zip(column_norms, owned, strict=True)]).sum()
    return at_once / torch.cat(list(column_norms)).sum()


def max_interval_by_gradients(column_norms: Sequence[Tensor], owned: Sequence[Tensor], share: float) -> Tensor | None:
    """Number of steps after which deferred gradients weigh as much as those that the device applies at once.

    The gradient rule of Zen-auto (arXiv 2505.12242, section 3.3; DeepSpeed's `auto_ratio`). Magnitudes are per entry, and deferred
    gradients add up over the steps. A matrix is full when the root mean square of its host-owned entries, times the steps, reaches that of
    its device-owned ones; the result is the step at which `share` of all matrices are full.

    Args:
        column_norms: for each matrix, sums of squares of its columns, float32, on the device.
        owned: for each matrix, the device-owned columns, int64, on the device; matrices of which all or none are owned do not count.
        share: 0 to 1.

    Returns:
        0-D float32 on the device, not finite if the gradients are not; None if no matrix counts.
    """
    ratios = []
    totals = [squared_norms.sum() for squared_norms in column_norms]
    for squared_norms, total, columns in zip(column_norms, totals, owned, strict=True):
        n, k = squared_norms.numel(), columns.numel()
        if 0 < k < n:
            at_once = squared_norms.index_select(0, columns).sum()
            waiting = (total - at_once).clamp_(min=0.0)
            ratios.append((at_once / k / (waiting / (n - k))).sqrt())
    if not ratios:
        return None
    full_at = torch.stack(ratios).sort().values[max(0, math.ceil(share * len(ratios)) - 1)]
    return torch.where(torch.isfinite(torch.stack(totals).sum()), full_at, torch.nan)
