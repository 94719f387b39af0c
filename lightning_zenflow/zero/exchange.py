"""Copies of the ranks' states in the order of another layout, for checkpoints that plain DeepSpeed reads."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.engine.flat_layout import FlatLayout, Run, runs
from lightning_zenflow.engine.on_disk import on_disk

_CHUNK = 1 << 24
"""Elements that are exchanged at once: 64 MB of device memory."""

Read = Callable[[int, int], Tensor]
"""Gives elements [begin, begin + numel) of a state, for a begin and a number; of any type."""


class OrderedCopy:
    """This rank's part of the states in another order, float32, on disk (`on_disk`): a copy in memory would take as much as the states.

    Args:
        folder: on the file system that the checkpoint is written to.
        layouts: of each parameter group.
        n_states: states of each element.

    Attributes:
        states: for each parameter group its states, [partition_numel], zeros at first.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, folder: Path, layouts: Sequence[FlatLayout], *, n_states: int) -> None:
        self._layouts = layouts
        self.states = [[on_disk(folder, layout.partition_numel) for _ in range(n_states)] for layout in layouts]

    def fill(
        self,
        states: Sequence[Sequence[Read]],
        layouts: Sequence[FlatLayout],
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """Copies the states of all ranks, which call it together. Waits for the other ranks.

        Args:
            states: as `OrderedCopy.states`, by their functions.
            layouts: their order.
            device: of the group's collectives.
            group: the ranks.
        """
        for target, source, theirs, ours in zip(self._layouts, layouts, states, self.states, strict=True):
            for run in runs(source, target):
                for from_, to in zip(theirs, ours, strict=True):
                    _copy(from_, to, run, device, group)


def _copy(read: Read, target: Tensor, run: Run, device: torch.device, group: dist.ProcessGroup) -> None:
    """Copies one run of elements. All ranks do so for all runs in the same order, so none waits for one that waits for it."""
    rank = dist.get_rank(group)
    for offset in range(0, run.numel, _CHUNK):
        n = min(_CHUNK, run.numel - offset)
        if rank == run.source_rank:
            values = read(run.source_begin + offset, n)
            if rank != run.target_rank:
                dist.send(values.to(device, torch.float32), group=group, group_dst=run.target_rank)
        if rank == run.target_rank:
            if rank != run.source_rank:
                values = torch.empty(n, dtype=torch.float32, device=device)
                dist.recv(values, group=group, group_src=run.source_rank)
            target.narrow(0, run.target_begin + offset, n).copy_(values)
