"""Strategies for `select_strategy` in tests: they choose columns at random, the same on every rank."""

import zlib

import torch
from torch import Tensor

from lightning_zenflow.topk.selector import SelectionContext

CALLS: list[SelectionContext] = []
"""What the strategy was called with; a test empties it."""


def choose(proxies: Tensor, context: SelectionContext) -> Tensor:
    """Up to k columns, anything from none to all of them new."""
    CALLS.append(context)
    generator = torch.Generator().manual_seed((zlib.crc32(context.parameter.encode()) + 7919 * context.step) % 2**31)
    k = int(torch.randint(0, context.k + 1, (), generator=generator))
    return torch.randperm(proxies.numel(), generator=generator)[:k]


def choose_too_many(proxies: Tensor, context: SelectionContext) -> Tensor:
    """More columns than allowed."""
    return torch.arange(context.k + 1)


NOT_CALLABLE = 3
