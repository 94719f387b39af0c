"""Importance of columns, and the top-k choice. Pure functions.

A column's importance is the squared norm of its gradient (ZenFlow, arXiv 2505.12242, section 3). Partitions hold row ranges, so each rank
sums over its own rows, and the sums are added over the ranks: one float per column instead of the gradient itself.
"""

import torch
from torch import Tensor

from lightning_zenflow.core.partition import column_count


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
