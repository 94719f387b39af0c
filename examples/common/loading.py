"""What the examples' data modules do alike: checks of their settings, and loaders of padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

PAD_MULTIPLE = 8
"""Batches are padded to a multiple of this many tokens, which matrix units like."""


def check_one_source(**sources: str | None) -> None:
    """ValueError unless exactly one of the `sources` is given."""
    if sum(value is not None for value in sources.values()) != 1:
        given = " and ".join(f"data.{key} (got {value!r})" for key, value in sources.items())
        raise ValueError(f"set exactly one of {given}")


def check_at_least(least: int, **settings: int) -> None:
    """ValueError where one of the `settings` is less than `least`."""
    for key, value in settings.items():
        if value < least:
            raise ValueError(f"data.{key}={value} is not allowed; it must be at least {least}")


def padded_length(longest: int, max_length: int) -> int:
    """Width in tokens of a batch whose longest row has `longest`."""
    return min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, max_length)


def data_loader(
    items: Sequence[Any],
    collate: Callable[[Any], Any],
    *,
    batch_size: int,
    num_workers: int,
    shuffle: bool = False,
    sampler: Sampler[int] | None = None,
) -> DataLoader[Any]:
    """Batches of `items`, which may be none, put together by `collate`; `sampler` goes before `shuffle`."""
    return DataLoader(
        items,  # type: ignore[arg-type]  # all that is asked of a data set is indexing and a length
        batch_size=batch_size,
        sampler=sampler,
        # A sampler that shuffles refuses to have nothing.
        shuffle=shuffle and sampler is None and bool(items),
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
