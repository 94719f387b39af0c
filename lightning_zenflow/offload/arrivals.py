"""Arrival of a step's gradients: complete slices and blocks, squared norms so far, and the submission of complete blocks in backward.

In backward the worker's update hides behind the backward pass, where d = 0.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.device import DeviceNumber
from lightning_zenflow.core.step_inputs import (
    StepScale,
    add_up,
    clip_factor,
    mean_beta1,
    predicted_squared_norm,
    smoothed_ratio,
)
from lightning_zenflow.offload.gradient_router import VectorGradients
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.plan import StepContext
from lightning_zenflow.offload.rank_state import Block, Blocks, RankState


class Arrivals:
    """Record of the gradients of the open step that have been routed; everything that depends on arrival reads it.

    Attributes:
        trained: slices whose gradients are expected.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.trained: Set[int] = frozenset(range(len(blocks.of_slice)))
        self._arrived: dict[int, None] = {}
        self._new: set[int] = set()

    @property
    def arrived(self) -> Set[int]:
        """Slices whose gradient of the whole step has been routed, in that order."""
        return self._arrived.keys()

    @property
    def missing(self) -> list[int]:
        """Trained slices without a gradient so far, ascending."""
        return sorted(self.trained - self.arrived)

    def open(self) -> None:
        """Begins a step."""
        self._arrived.clear()
        self._new.clear()
        for block in self._blocks:
            block.missing = block.slices & self.trained

    def slice_complete(self, index: int) -> list[Block]:
        """Notes that a slice's gradient of the whole step has been routed.

        Returns:
            Blocks that are complete with it, ascending.
        """
        self._arrived[index] = None
        self._new.add(index)
        for block in self._blocks.of_slice[index]:
            block.missing.discard(index)
        return [block for block in self._blocks.of_slice[index] if not block.missing]

    def take_new(self) -> Set[int]:
        """Slices that have been completed since the last call."""
        new, self._new = self._new, set()
        return new


class GradientNorms:
    """Squared norms of a step's gradients, in order of arrival: their sum, which is predicted in backward from its part so far.

    The prediction is the sum up to a block's arrival times its ratio to the whole in the steps before whose norm was finite. It is a
    function of the gradients alone, so that runs repeat; ranks predict from their own parts. Nothing here is read by the host.

    Args:
        n_blocks: number of blocks.
        device: of the gradients.
    """

    def __init__(self, n_blocks: int, device: torch.device) -> None:
        self._parts: list[Tensor] = []
        self._n_in_sum = 0  # of the parts
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._partial = torch.zeros(n_blocks, dtype=torch.float64, device=device)
        self._ratio = torch.full((n_blocks,), torch.nan, dtype=torch.float64, device=device)
        self._of_block = list(zip(self._partial.unbind(), self._ratio.unbind(), strict=True))
        self._last = torch.zeros((), dtype=torch.float64, device=device)
        self._expected = self._last.clone()
        self.knows_last = False
        """Whether there has been a step to predict from."""

    def open(self, loss_scale: float) -> None:
        """Begins a step."""
        self._parts.clear()
        self._n_in_sum = 0
        self._sum.zero_()
        self._partial.zero_()
        # In its own memory: backward and the step use different streams.
        torch.mul(self._last, loss_scale**2, out=self._expected)

    def add(self, parts: Iterable[Tensor]) -> None:
        """Adds gradients that have arrived: their `SquaredNorms.parts`."""
        self._parts += parts

    def whole(self) -> Tensor:
        """Sum of all that has been added in the step: 0-D float64, not finite if any gradient is not."""
        return add_up(self._parts) if self._parts else torch.zeros_like(self._sum)

    def up_to(self, block: int) -> Tensor:
        """Sum of what has been added when a block is complete: 0-D float64, not finite if any gradient so far is not."""
        if len(self._parts) > self._n_in_sum:
            self._sum.add_(add_up(self._parts[self._n_in_sum :]))
            self._n_in_sum = len(self._parts)
        return self._of_block[block][0].copy_(self._sum)

    def predict(self, block: int) -> Tensor:
        """Squared norm of the step's whole gradient, of all ranks and with loss scale: 0-D float64; after `up_to`."""
        return predicted_squared_norm(*self._of_block[block], self._expected)

    def end_step(self, squared_norm: Tensor, *, finite: Tensor, loss_scale: float) -> None:
        """Takes the step's own squared norm, 0-D float64; one that is not finite is not predicted from."""
        ratio = smoothed_ratio(self._ratio, squared_norm, self._partial)
        self._ratio.copy_(torch.where(finite, ratio, self._ratio))
        self._last.copy_(torch.where(finite, squared_norm / loss_scale**2, self._last))
        self.knows_last = True

    def state_dict(self) -> dict[str, Any] | None:
        """Ratio and norm that the next step is predicted from, on the CPU; None: nothing yet."""
        return {"ratio": self._ratio.cpu(), "last": self._last.cpu()} if self.knows_last else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`, for the same blocks."""
        self.knows_last = state is not None
        if state is not None:
            self._ratio.copy_(state["ratio"])
            self._last.copy_(state["last"])


class BackwardSubmission:
    """Phase *submit* of `JobQueue` for single blocks, as soon as the gradients of all of their trained slices have arrived.

    The factor on the gradients (clipping) is known only at the end of backward. A complete block is submitted before, with a factor that
    decides on nothing but the weights that the next forward pass sees; the exact state always takes the true one, with the block's next
    job.
    Without clipping the factor is known, unless a gradient overflows. With clipping it is

    * *predicted* from the gradients so far (`GradientNorms`). The weights differ by at most (1 - beta1) of one normalised update times the
      factor's error, once; or not at all in place, where blocks with another factor than the true one are published again;
    * *speculated*, where such blocks would have to wait at the end of the step: as in a step that is not clipped. Behind two applied steps
      that were clipped no block is submitted in backward.

    `JobQueue` verifies the factor where forward passes must not see another one than the true one. From the first gradient on that is not
    finite, submitted blocks are published without the step. (A vector's gradient counts when its block is submitted.)

    Args:
        speculates: whether factors are speculated.

    Attributes:
        factor_error: mean relative error of the factors in backward in some step since it was read.
    """

    def __init__(
        self, rank: RankState, jobs: JobQueue, norms: GradientNorms, vectors: VectorGradients, *, speculates: bool
    ) -> None:
        self._rank = rank
        self._jobs = jobs
        self._norms = norms
        self._vectors = vectors
        self._speculates = speculates
        self._factors: list[Tensor] = []
        self.factor_error = DeviceNumber()

    def open(self) -> None:
        """Begins a step."""
        self._factors.clear()

    def submit(self, blocks: Iterable[Block], arrived: Set[int], context: StepContext) -> None:
        """Submits complete blocks whose windows close.

        Args:
            blocks: result of `Arrivals.slice_complete`.
            arrived: slices whose gradients have been routed.
            context: inputs of the step, which submits in backward.
        """
        inputs = context.inputs
        has_factor = inputs.max_norm == 0 or self._has_factor
        for block in blocks:
            # A block that changes its columns needs its exact state at the end of the step.
            submits = self._jobs.can_submit_in_backward(block, context.number) and not block.changes_columns
            if submits := submits and has_factor:
                self._jobs.acquire([block], context.number)
                self._norms.add(self._vectors.fill([block], arrived))
            squared_norm = self._norms.up_to(block.number)
            if not submits:
                continue
            if self._speculates:
                # Zero, or NaN where the sum is not finite.
                squared_norm = squared_norm - squared_norm
            elif inputs.max_norm > 0:
                squared_norm = self._norms.predict(block.number)
            if not self._jobs.submitted_in_backward:
                self._rank.arena.write_hyperparameters(context.number, list(inputs.groups), tentative=True)
            factor = clip_factor(squared_norm, max_norm=inputs.max_norm, loss_scale=inputs.loss_scale)
            self._factors.append(factor)
            self._jobs.submit_in_backward(block, context.number, factor, beta1=mean_beta1(inputs.groups))

    @property
    def _has_factor(self) -> bool:
        """Whether there has been a step to predict from, or one to speculate that the next will be like it."""
        return self._jobs.verification.may_speculate if self._speculates else self._norms.knows_last

    def end_step(self, squared_norm: Tensor, scale: StepScale, context: StepContext) -> None:
        """Takes the step's own squared norm, 0-D float64 of all ranks, and its scale."""
        if context.plan.submits_in_backward and context.inputs.max_norm > 0:
            if not self._speculates:
                self._norms.end_step(squared_norm, finite=scale.finite, loss_scale=context.inputs.loss_scale)
            if self._factors and not self.factor_error.is_under_way:
                self.factor_error.copy((torch.stack(self._factors) / scale.factor - 1).abs().mean())
