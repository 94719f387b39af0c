"""Hands blocks over while backward goes on, so that S = 1, d = 0, which is AdamW itself, hides behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.worker.arena import Arena


@dataclass(kw_only=True)
class _Step:
    """One step's early jobs."""

    number: int
    factor: Tensor
    """0-D float32 on the device: of every gradient, known beforehand."""
    missing: list[set[int]]
    """For each block the slices whose gradient is not there yet."""
    groups: Sequence[GroupHyperparameters] = ()
    """What the worker was told; empty before the first early round."""


class BackwardSubmission:
    """Phase *hand over* of `JobQueue` for single blocks, as soon as the gradient of everything that is trained in them has arrived.

    In a step whose gradients are not clipped their factor is known before its backward ends, and with S = 1, d = 0 its windows close in
    it. So a complete block need not wait for the others: it goes to the worker at once, with a word of its own (``csrc/protocol.h``,
    *early*). The numbers are those of a hand-over at the end of the step, bit for bit.

    Only what is not finite makes a difference. From the first gradient on that is not, a block's word says that the step changes nothing
    in it; blocks before that have been updated. (What `VectorGradients` keeps counts when its block is handed over.) So a step changes
    nothing at all if its gradients are not finite from the first one on, as behind a loss that is not; neither does it in blocks without
    any gradient, which are handed over with the step.

    Args:
        partition: the rank's partition.
        arena: where the step's hyperparameters are written.
        jobs: takes the blocks.
        small: fills in what of a block has only been kept.
        hyperparameters: reads those of the present step.
        device: where gradients come from.
    """

    def __init__(
        self,
        partition: Partition,
        arena: Arena,
        jobs: JobQueue,
        small: VectorGradients,
        *,
        hyperparameters: Callable[[], Sequence[GroupHyperparameters]],
        device: torch.device,
    ) -> None:
        self._arena = arena
        self._jobs = jobs
        self._small = small
        self._hyperparameters = hyperparameters
        self._device = device
        self._blocks_of_slice: list[list[int]] = [[] for _ in partition.slices]
        for number, block in enumerate(partition.blocks):
            for index in {partition.tiles[tile].slice for tile in block.tiles}:
                self._blocks_of_slice[index].append(number)
        self._n_blocks = len(partition.blocks)
        self._sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
        self._step: _Step | None = None

    def begin(self, step: int | None, *, loss_scale: float) -> None:
        """Says whether the next step's blocks are to be handed over early.

        Args:
            step: its number if they are, else None.
            loss_scale: factor that its loss is multiplied by before backward.
        """
        self._step = None
        if step is None:
            return
        self._sum_of_squares.zero_()
        self._step = _Step(
            number=step,
            factor=torch.full((), 1.0 / loss_scale, device=self._device),
            missing=[set(self._jobs.slices_of(block)) for block in range(self._n_blocks)],
        )

    def delivered(self, slice_index: int, sums_of_squares: Sequence[Tensor]) -> None:
        """A slice's gradient of the whole step has been copied; hands over what is complete with it.

        Args:
            slice_index: index into `Partition.slices`.
            sums_of_squares: 0-D on the device; together the gradient's. None where `VectorGradients` has it, which adds its own.
        """
        step = self._step
        if step is None:
            return
        for part in sums_of_squares:
            self._sum_of_squares.add_(part)
        for block in self._blocks_of_slice[slice_index]:
            missing = step.missing[block]
            if slice_index in missing:
                missing.discard(slice_index)
                if not missing:
                    self._submit(block, step)

    def end(self, groups: Sequence[GroupHyperparameters]) -> None:
        """Ends the step, whether or not anything was handed over early in it.

        Args:
            groups: the hyperparameters of the step, as they are after its backward.

        Raises:
            MisconfigurationException: they have been changed since the worker was told.
        """
        step, self._step = self._step, None
        if step is not None and step.groups and list(step.groups) != list(groups):
            raise MisconfigurationException(
                "ZenFlowStrategy: a hyperparameter of the optimizer was changed between backward pass and optimizer step, when parts of the"
                " update had been made with the old one: change it before the backward pass (scheduler, on_train_batch_start), or set"
                " optimizer_in_backward=False"
            )

    def _submit(self, block: int, step: _Step) -> None:
        if not self._jobs.can_submit_in_backward(block):
            return
        of_small = self._small.fill(block)
        if of_small is not None:
            self._sum_of_squares.add_(of_small)
        if not step.groups:
            step.groups = self._hyperparameters()
            self._arena.write_hyperparameters(step.number, list(step.groups))
        finite = torch.isfinite(self._sum_of_squares.float())
        self._jobs.submit_in_backward(block, step.number, torch.where(finite, step.factor, torch.nan))
