"""Submission of blocks during backward, which hides S = 1, d = 0 (AdamW itself) behind the backward pass."""

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.step.arrivals import Arrivals
from lightning_zenflow.step.context import StepContext
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.worker.rank_state import RankState


class BackwardSubmission:
    """Phase *submit* of `JobQueue` for single blocks, as soon as the gradients of all of their trained slices have arrived.

    In a step whose gradients are not clipped, the factor on the gradients is known before backward ends, and with S = 1, d = 0 its windows
    close in the step. A complete block is then submitted at once, with a sequence number of its own (``protocol.h``). The numbers have the
    bits of a submission at the end of the step.

    Gradients that are not finite make the only difference. From the first such gradient on, submitted blocks do not change; blocks
    submitted before it have been updated. (A vector's gradient counts when its block is submitted.)
    """

    def __init__(self, rank: RankState, jobs: JobQueue, arrivals: Arrivals, vectors: VectorGradients) -> None:
        self._rank = rank
        self._jobs = jobs
        self._arrivals = arrivals
        self._vectors = vectors
        self._squared_norm = torch.zeros((), dtype=torch.float64, device=rank.device)
        self._n_added = 0

    def open(self) -> None:
        """Begins a step."""
        self._squared_norm.zero_()
        self._n_added = 0

    def submit(self, blocks: Iterable[int], context: StepContext) -> None:
        """Submits complete blocks.

        Args:
            blocks: result of `Arrivals.slice_complete`.
            context: inputs of the step, which submits in backward.
        """
        for block in blocks:
            if not self._jobs.can_submit_in_backward(block):
                continue
            self._arrivals.squared_norms += self._vectors.fill(self._arrivals.arrived, block=block)
            for squared_norm in self._arrivals.squared_norms[self._n_added :]:
                self._squared_norm.add_(squared_norm.sum())
            self._n_added = len(self._arrivals.squared_norms)
            if not self._jobs.submitted_in_backward:
                self._rank.arena.write_hyperparameters(context.number, list(context.groups))
            factor = torch.full((), 1.0 / context.loss_scale, device=self._rank.device)
            finite = torch.isfinite(self._squared_norm.float())
            self._jobs.submit_in_backward(block, context.number, torch.where(finite, factor, torch.nan))

    def check_hyperparameters(self, context: StepContext, groups: Sequence[GroupHyperparameters]) -> None:
        """Compares the hyperparameters after backward with those that were submitted.

        Raises:
            MisconfigurationException: they have changed, and blocks have been submitted.
        """
        if self._jobs.submitted_in_backward and list(context.groups) != list(groups):
            raise MisconfigurationException(
                "ZenFlowStrategy: hyperparameters of the optimizer must not change between the backward pass and the optimizer step, got a"
                " change after parts of the update had been submitted: change them before the backward pass (scheduler,"
                " on_train_batch_start), or set optimizer_in_backward=False"
            )
