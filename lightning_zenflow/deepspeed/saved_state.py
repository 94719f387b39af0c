"""AdamW's state in DeepSpeed's folders: in DeepSpeed's order, and continued from."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.deepspeed.flat_buffers import DiskCopies, Layout, runs
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, MOMENTS
from lightning_zenflow.training import Training
from lightning_zenflow.worker.moments import CodedMoment


class SavedState:
    """This rank's state for saves to folders and loads from them.

    Args:
        training: the training.

    Attributes:
        copies: during a save for each flat partition copies of the states, the moments last; None: DeepSpeed reads the arena.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._reserved: list[list[Tensor]] | None = None
        self.copies: list[list[Tensor]] | None = None

    def reserve(self, disk: DiskCopies, layouts: Sequence[Layout], saved_layouts: Sequence[Layout]) -> None:
        """Takes the disk space that a save to a folder needs beside DeepSpeed's files, for all states in another order or for moments
        without views; in memory the copies would take as much as the states. The next step is `gather`.

        Raises:
            OSError: the disk is full.
        """
        self._reserved = None
        is_reordered = saved_layouts != layouts
        if is_reordered or isinstance(self._training.host_state.states[MOMENTS[0]], CodedMoment):
            n_states = is_reordered + len(MOMENTS)
            self._reserved = [[disk.zeros(layout.partition_numel) for _ in range(n_states)] for layout in saved_layouts]

    def gather(self, layouts: Sequence[Layout], saved_layouts: Sequence[Layout]) -> None:
        """Fills what was reserved with the exact state, which `complete` takes then; all ranks call it together."""
        copies, self._reserved = self._reserved, None
        if copies is not None:
            self._training.flush()
            for number, (of_partition, *of_layouts) in enumerate(zip(copies, layouts, saved_layouts, strict=True)):
                self._copy_reordered(number, of_partition, *of_layouts)
        self.copies = copies

    def _copy_reordered(self, number: int, copies: Sequence[Tensor], source: Layout, target: Layout) -> None:
        """Copies a flat partition's states, of which all ranks have parts, into another order; the moments are the last of them."""
        rank_state = self._training.parts.rank
        group = rank_state.group
        device, begin, rank = rank_state.device, rank_state.partition.group_begins[number], dist.get_rank(group)
        states = list(self._training.host_state.states.values())[-len(copies) :]
        # The order is that of all ranks, so that none waits for one that waits for it.
        for run, (state, to) in product(runs(source, target), zip(states, copies, strict=True)):
            if rank == run.source_rank:
                values = state.read(begin + run.source_begin, run.numel)
                if rank != run.target_rank:
                    dist.send(values.to(device, torch.float32), group=group, group_dst=run.target_rank)
            if rank == run.target_rank:
                if rank != run.source_rank:
                    values = torch.empty(run.numel, dtype=torch.float32, device=device)
                    dist.recv(values, group=group, group_src=run.source_rank)
                to.narrow(0, run.target_begin, run.numel).copy_(values)

    def complete(self, state: dict[str, Any], key: str) -> dict[str, Any]:
        """DeepSpeed's state of its optimizer, right after a flush, with AdamW's at `key` and what else continues the run."""
        state[key] = self._training.host_state.as_saved(state[key], self.copies)
        state[CHECKPOINT_KEY] = self._training.state_dict()
        return state

    def load(self, saved: Mapping[str, Any], *, optimizer_states: bool) -> None:
        """Continues from this rank's state in a folder, right after a flush; all ranks call it together.

        A checkpoint of this strategy with the same configuration and the same ranks continues the run that wrote it; after any other one
        nothing is device-owned until the first step has selected columns.

        Args:
            saved: "partitions": for each flat partition master weights and moments, [partition_numel], any type; what else
                `Training.load` has.
            optimizer_states: whether the optimizer's state is loaded, and not only weights.
        """
        self._training.host_state.load(saved["partitions"], moments=optimizer_states)
        self._training.continue_from(saved if optimizer_states else None)
