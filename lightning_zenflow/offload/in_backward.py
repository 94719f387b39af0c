"""Blocks that are submitted in backward, where the worker's update hides with d = 0: the clip factor that they show, and phase *verify* of
`JobQueue`, where no forward pass sees a clip factor other than the true one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zenflow.core.device import DeviceNumber
from lightning_zenflow.core.step_inputs import GradientNorms, StepScale, clip_factor, mean_beta1
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.rank_state import Block, RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker

if TYPE_CHECKING:
    from lightning_zenflow.offload.fill import VectorGradients
    from lightning_zenflow.offload.jobs import JobQueue
    from lightning_zenflow.offload.plan import StepContext


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
        self, rank: RankState, jobs: "JobQueue", norms: GradientNorms, vectors: "VectorGradients", *, speculates: bool
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

    def submit(self, blocks: Iterable[Block], arrived: Set[int], context: "StepContext") -> None:
        """Submits complete blocks whose windows close.

        Args:
            blocks: those whose last slice has arrived.
            arrived: slices whose gradients have been routed.
            context: inputs of the step, which submits in backward.
        """
        inputs = context.inputs
        # Whether there has been a step to predict from, or one to speculate that the next will be like it.
        knows_factor = self._jobs.verification.may_speculate if self._speculates else self._norms.knows_last
        has_factor = inputs.max_norm == 0 or knows_factor
        for block in blocks:
            # A block that changes its columns needs its exact state at the end of the step.
            can_submit = self._jobs.can_submit_in_backward(block, context.number) and not block.changes_columns
            if submits := can_submit and has_factor:
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

    def end_step(self, squared_norm: Tensor, scale: StepScale, context: "StepContext") -> None:
        """Takes the step's own squared norm, 0-D float64 of all ranks, and its scale."""
        if context.plan.submits_in_backward and context.inputs.max_norm > 0:
            if not self._speculates:
                self._norms.end_step(squared_norm, finite=scale.finite, loss_scale=context.inputs.loss_scale)
            if self._factors and not self.factor_error.is_under_way:
                self.factor_error.copy((torch.stack(self._factors) / scale.factor - 1).abs().mean())


_UNCLIPPED = 1 - 2**-20
"""Smallest clip coefficient of a step without clipping: 1 but for the rounding of the factor."""

_IN_A_ROW = 2
"""Clipped steps behind which no factor is speculated. A wrong guess costs as much as a step that begins its update at its end: behind a
single clipped step guessing right saves more."""


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A step whose word has not been read."""

    number: int
    """Of the step."""
    loss_scale: float
    """Of its backward pass."""
    blocks: Sequence[Block]
    """Those that were submitted in backward, in order."""
    resubmitted: Sequence[Block]
    """Those of them that have been submitted with the true factor since."""


class Verification:
    """Finds the blocks that show a step with another factor than its own, and decides whether blocks may be submitted in backward.

    A block that is submitted in backward shows the step with a factor from before the step's end, which is in the block's word. The step's
    own factor is in the step's word. The training thread reads both when the worker has answered a job that waits for the step's word.
    Where no other job does, that is a *correction* of the last block: the block is submitted once more, tentatively with the step's factor,
    and the worker has nothing to do if that is the block's. In place (`RankState.in_place`) a correction is published. Otherwise it only
    waits for the word, and blocks with another factor are submitted with the step committed. What follows depends on factors alone, so that
    runs repeat.

    Args:
        in_flight: takes the corrections.
        verifies: whether there is such a phase; false where forward passes may see predicted factors.

    Attributes:
        n_clipped: applied steps up to the last one whose word was read that were clipped in a row. At the start: as many as make a step
            careful whose factor would have to be speculated, otherwise 0.
        step: the step that phase *verify* has begun for; None: it has ended.
        n_corrected: steps so far that some block has shown, or would have shown, with another factor than the true one.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, in_flight: JobsInFlight, *, verifies: bool) -> None:
        self._verifies = verifies
        self._rank = rank
        self._worker = worker
        self._in_flight = in_flight
        self._in_place = rank.in_place
        self.n_clipped = 0 if rank.in_place else _IN_A_ROW
        self.step: ShownStep | None = None
        self.n_corrected = 0

    @property
    def may_speculate(self) -> bool:
        """Whether the next step is likely to be one without clipping."""
        return self.n_clipped < _IN_A_ROW

    @property
    def is_in_doubt(self) -> bool:
        """Whether some weights are shown that another submission may have to replace."""
        return self.step is not None and len(self.step.resubmitted) < len(self.step.blocks)

    def begin(
        self, step: int, shown: Sequence[Block], *, as_shown: bool, loss_scale: float, is_awaited: bool
    ) -> Sequence[Block]:
        """Begins the phase, behind *seal*.

        Args:
            step: number of the step.
            shown: blocks that were submitted in backward, in order.
            as_shown: whether the step has the hyperparameters of the jobs in backward.
            loss_scale: of the step.
            is_awaited: whether a job that commits the step is published in it.

        Returns:
            Blocks that are to be submitted with the step committed, because all of them differ.
        """
        if not self._verifies:
            return ()
        one = shown[-1:]
        # In place they hide behind the forward pass, which would otherwise wait for the first answer.
        all_differ = not as_shown or (self._in_place and self.n_clipped > 0)
        resubmitted = shown if all_differ else one if self._in_place else ()
        if self._in_place or as_shown:
            # In that order: in place the worker takes the newest first.
            for block in resubmitted or one:
                self._correct(block, step)
        if shown or (is_awaited and not self._in_place):
            self.step = ShownStep(number=step, loss_scale=loss_scale, blocks=shown, resubmitted=resubmitted)
        return () if self._in_place else resubmitted

    def end(self, correct: Callable[[Block], object] | None = None) -> None:
        """Ends the phase, once the step's word has arrived.

        Args:
            correct: submits a block again, which shows another factor than the step's own; None: all have been.
        """
        if (step := self.step) is None:
            return
        factor = self._rank.arena.step_words.factor(step.number)
        shown = self._rank.arena.block_words.clip[[block.number for block in step.blocks]]
        # A step that changes nothing must not be shown, by a factor that is not finite either.
        others = ((shown != factor) if math.isfinite(factor) else shown.isfinite()).tolist()
        for block in itertools.compress(step.blocks, others):
            if correct is not None and block not in step.resubmitted:
                correct(block)
        # Behind the corrections, which are repeated if they are interrupted.
        if math.isfinite(factor):
            is_clipped = factor * step.loss_scale < _UNCLIPPED
            self.n_clipped = min(self.n_clipped + 1, _IN_A_ROW) if is_clipped else 0
        self.n_corrected += any(others)
        self.step = None

    def run_in_place(self) -> None:
        """Waits for the step's word and corrects the blocks that differ, before a forward pass fetches their weights."""
        if self.step is not None:
            self._in_flight.publish_blocks(self.step.blocks[-1:], "publish_wait")
            self.end(partial(self._correct, step=self.step.number))

    def _correct(self, block: Block, step: int) -> None:
        """Submits a block again that was submitted in backward, with the true factor."""
        window = block.window
        assert window is not None, "its last gradient is tentative"
        buffer = block.number if self._in_place else None
        with self._rank.records:
            # The block's window goes on.
            again = dataclasses.replace(window, slots=list(window.slots))
            self._in_flight.enqueue(
                block, again, buffer, due_step=step + self._in_place, tentative=Tentative.CORRECTION
            )
        self._worker.send()
