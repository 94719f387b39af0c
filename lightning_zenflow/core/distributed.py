"""Collective error handling: an error on one rank is raised on all ranks, so that none waits for a rank that has left."""

from collections.abc import Callable

import torch.distributed as dist


def raise_together(error: Exception | None, kind: Callable[[str], Exception]) -> None:
    """Raises an exception on every rank if any rank has an error. A collective: all ranks must call it.

    Args:
        error: error of this rank, if any.
        kind: makes the exception of ranks without an error from the message of the first rank with one.

    Raises:
        Exception: `error`, or one made by `kind`.
    """
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise kind(f"rank {rank}: {message}")
