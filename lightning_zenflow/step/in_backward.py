"""Submission of blocks during backward, which hides the worker's update behind the backward pass where d = 0."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import StepScale, mean_beta1, step_scale
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.step.arrivals import Arrivals
from lightning_zenflow.step.context import StepContext
from lightning_zenflow.step.norm_prediction import NormPrediction
from lightning_zenflow.step.vectors import VectorGradients
from lightning_zenflow.topk.ownership import Ownership
from lightning_zenflow.worker.rank_state import RankState


class BackwardSubmission:
    """Phase *submit* of `JobQueue` for single blocks, as soon as the gradients of all of their trained slices have arrived.

    The factor on the gradients (clipping) is known only at the end of backward. A complete block is submitted before, with a predicted
    factor that decides on nothing but the weights that the next forward pass sees; the exact state always takes the true one, with the
    block's next job. They differ by at most (1 - beta1) of one normalised update times the factor's error, once. Without clipping the
    prediction is the factor, and the weights have the bits of a submission at the end of the step.

    From the first gradient on that is not finite, submitted blocks are published without the step. (A vector's gradient counts when its
    block is submitted.)
    """

    def __init__(
        self, rank: RankState, jobs: JobQueue, arrivals: Arrivals, vectors: VectorGradients, ownership: Ownership
    ) -> None:
        self._rank = rank
        self._jobs = jobs
        self._arrivals = arrivals
        self._vectors = vectors
        self._ownership = ownership
        self._norms = NormPrediction(len(rank.partition.blocks), rank.device)
        self._count = torch.zeros((), dtype=torch.float64, device=rank.device)
        self._n_added = 0
        self._factors: list[Tensor] = []

    def open(self) -> None:
        """Begins a step."""
        self._norms.open()
        self._n_added = 0
        self._factors.clear()

    def submit(self, blocks: Iterable[int], context: StepContext) -> None:
        """Submits complete blocks whose windows close.

        Args:
            blocks: result of `Arrivals.slice_complete`.
            context: inputs of the step, which submits in backward.
        """
        for block in blocks:
            # A block that changes its columns needs its exact state at the end of the step.
            submits = self._jobs.can_submit_in_backward(block, context.number) and block not in self._ownership.waiting
            submits = submits and (context.max_norm == 0 or self._norms.knows_last)
            if submits:
                self._jobs.acquire([block], context.number)
                self._arrivals.squared_norms += self._vectors.fill(self._arrivals.arrived, block=block)
            squared_norm = self._norms.add(block, self._arrivals.squared_norms[self._n_added :])
            self._n_added = len(self._arrivals.squared_norms)
            if not submits:
                continue
            if context.max_norm > 0:
                squared_norm = self._norms.predict(block, loss_scale=context.loss_scale)
            if not self._jobs.submitted_in_backward:
                self._rank.arena.write_hyperparameters(context.number, list(context.groups), tentative=True)
            scale = step_scale(
                squared_norm, max_norm=context.max_norm, loss_scale=context.loss_scale, count=self._count
            )
            self._factors.append(scale.factor)
            self._jobs.submit_in_backward(block, context.number, scale.factor, beta1=mean_beta1(context.groups))

    def end_step(self, squared_norm: Tensor, scale: StepScale, context: StepContext) -> Tensor | None:
        """Takes the step's own squared norm, 0-D float64 of all ranks, and its scale.

        Returns:
            Mean relative error of the predicted factors, 0-D float32; None if none was predicted.
        """
        if not context.plan.submits_in_backward or context.max_norm == 0:
            return None
        self._norms.end_step(squared_norm, finite=scale.finite, loss_scale=context.loss_scale)
        return (torch.stack(self._factors) / scale.factor - 1).abs().mean() if self._factors else None

    def state_dict(self) -> dict[str, Any] | None:
        """Ratio and norm that the next step's norm is predicted from; None: nothing yet."""
        return self._norms.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`."""
        self._norms.load_state_dict(state)
