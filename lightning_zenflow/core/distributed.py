"""Agreement of the ranks: on errors, so that none waits for a rank that has left, and on what is possible."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """Number of ranks; 1 where `torch.distributed` is not in use."""
    return dist.get_world_size() if dist.is_initialized() else 1


def in_common(values: Sequence[T]) -> list[T]:
    """Values that every rank has, in the order of this rank. A collective: all ranks must call it."""
    of_rank: list[Sequence[T]] = [values] * world_size()
    if len(of_rank) > 1:
        dist.all_gather_object(of_rank, values)
    common = set(values).intersection(*of_rank)
    return [value for value in values if value in common]


def all_agree(flag: bool) -> bool:
    """True if a flag is set on every rank. A collective: all ranks must call it."""
    return bool(in_common([flag] if flag else []))


def raise_together(
    error: BaseException | None, kind: Callable[[str], Exception], group: dist.ProcessGroup | None = None
) -> None:
    """Raises an exception on every rank if any rank has an error. A collective: all ranks must call it, unless their group has ended.

    Args:
        error: error of this rank, if any.
        kind: makes the exception of ranks without an error from the message of the first rank with one.
        group: group of all ranks; None: the default one.

    Raises:
        Exception: `error`, or one made by `kind`.
    """
    messages: list[str | None] = [None] * world_size()
    if len(messages) > 1:
        dist.all_gather_object(messages, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise kind(f"rank {rank}: {message}")


@contextmanager
def raising_together(kind: Callable[[str], Exception], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context at whose end an error of one rank is raised on every rank, as by `raise_together`, so that the others need not wait for it.

    A collective: all ranks must enter it, and there must be no other collective inside.
    """
    try:
        yield
    except Exception as error:
        # Raises; where the exchange itself fails, this error is in the traceback as well.
        raise_together(error, kind, group)
    else:
        raise_together(None, kind, group)
