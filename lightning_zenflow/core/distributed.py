"""An error on one rank becomes an error on all of them, so that none waits for one that has left."""

from collections.abc import Callable

import torch.distributed as dist


def raise_together(error: Exception | None, kind: Callable[[str], Exception]) -> None:
    """Ends a part of the work that may fail on some ranks only. All ranks call it, and all of them wait for each other.

    Args:
        error: this rank's, if it has one.
        kind: makes what is raised on ranks that have none, from the message of the first that has one.

    Raises:
        Exception: `error`, or one of `kind`.
    """
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise kind(f"rank {rank}: {message}")
