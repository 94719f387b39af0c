"""Phase *verify* of `JobQueue`, where no forward pass may see a clip factor other than the true one."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

from lightning_zenflow.native import Tentative
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.plan import StepContext
from lightning_zenflow.offload.rank_state import Block, RankState

_UNCLIPPED = 1 - 2**-20
"""Smallest clip coefficient of a step without clipping: 1 but for the rounding of the factor."""

_IN_A_ROW = 2
"""Clipped steps behind which no factor is speculated. A wrong guess costs as much as a step that begins its update at its end: behind a
single clipped step guessing right saves more."""


class Verification:
    """Finds the blocks that show a step with another factor than its own, and decides whether blocks may be submitted in backward.

    A block that is submitted in backward shows the step with a factor from before the step's end, which is in the block's word. The step's
    own factor is in the step's word. The training thread reads both when the worker has answered a job that waits for the step's word.
    Where no other job does, that is a *correction* of the last block: the block is submitted once more, tentatively with the step's factor,
    and the worker has nothing to do if that is the block's. In place (`RankState.in_place`) a correction is published, and blocks with
    another factor are corrected as well. Otherwise it only waits for the word, and these are submitted with the step committed. What
    follows depends on factors alone, so that runs repeat.

    Args:
        in_flight: takes the corrections.

    Attributes:
        n_clipped: applied steps up to the last one whose word was read that were clipped in a row. At the start: as many as make a step
            careful whose factor would have to be speculated, otherwise 0.
        step: the step that phase *verify* has begun for, whose word has not been read; None: the phase has ended.
        n_corrected: steps so far that some block has shown, or would have shown, with another factor than the true one.
    """

    def __init__(self, rank: RankState, in_flight: JobsInFlight) -> None:
        self._rank = rank
        self._in_flight = in_flight
        self.n_clipped = 0 if rank.in_place else _IN_A_ROW
        self.step: StepContext | None = None
        # Of that step: blocks that were submitted in backward, in order; those of them that have been submitted with the true factor since.
        self._shown: Sequence[Block] = ()
        self._resubmitted: Sequence[Block] = ()
        self.n_corrected = 0

    @property
    def may_speculate(self) -> bool:
        """Whether the next step is likely to be one without clipping."""
        return self.n_clipped < _IN_A_ROW

    @property
    def is_in_doubt(self) -> bool:
        """Whether some weights are shown that another submission may have to replace."""
        return self.step is not None and len(self._resubmitted) < len(self._shown)

    def begin(
        self, context: StepContext, shown: Sequence[Block], *, as_shown: bool, is_awaited: bool
    ) -> Sequence[Block]:
        """Begins the phase, behind *seal*.

        Args:
            context: the step.
            shown: blocks that were submitted in backward, in order.
            as_shown: whether the step has the hyperparameters of the jobs in backward.
            is_awaited: whether a job that commits the step is published in it.

        Returns:
            Blocks that are to be submitted with the step committed, because all of them differ.
        """
        one, in_place = shown[-1:], self._rank.in_place
        # In place they hide behind the forward pass, which would otherwise wait for the first answer.
        all_differ = not as_shown or (in_place and self.n_clipped > 0)
        resubmitted = shown if all_differ else one if in_place else ()
        if in_place or as_shown:
            # In that order: in place the worker takes the newest first.
            for block in resubmitted or one:
                self._correct(block, context.number)
        if shown or (is_awaited and not in_place):
            self._shown, self._resubmitted, self.step = shown, resubmitted, context
        return () if in_place else resubmitted

    def end(self, correct: Callable[[Block], object] | None = None) -> None:
        """Ends the phase, if it has begun, once the step's word has arrived.

        Args:
            correct: submits a block again, which shows another factor than the step's own; None: all have been.
        """
        if (step := self.step) is None:
            return
        factor = self._rank.arena.step_words.factor(step.number)
        shown = self._rank.arena.block_words.clip[[block.number for block in self._shown]]
        # A step that changes nothing must not be shown, by a factor that is not finite either.
        others = ((shown != factor) if math.isfinite(factor) else shown.isfinite()).tolist()
        for block in itertools.compress(self._shown, others):
            if correct is not None and block not in self._resubmitted:
                correct(block)
        # Behind the corrections, which are repeated if they are interrupted.
        if math.isfinite(factor):
            is_clipped = factor * step.inputs.loss_scale < _UNCLIPPED
            self.n_clipped = min(self.n_clipped + 1, _IN_A_ROW) if is_clipped else 0
        self.n_corrected += any(others)
        self.step = None

    def run_in_place(self) -> None:
        """Waits for the step's word and corrects the blocks that differ, before a forward pass fetches their weights."""
        if self.step is not None:
            self._in_flight.publish_blocks(self._shown[-1:], "publish_wait")
            self.end(partial(self._correct, step=self.step.number))

    def _correct(self, block: Block, step: int) -> None:
        """Submits a block again that was submitted in backward, with the true factor."""
        window, in_place = block.window, self._rank.in_place
        assert window is not None, "its last gradient is tentative"
        buffer = block.number if in_place else None
        with self._rank.records:
            # The block's window goes on.
            again = dataclasses.replace(window, slots=list(window.slots))
            self._in_flight.enqueue(block, again, buffer, due_step=step + in_place, tentative=Tentative.CORRECTION)
        self._rank.worker.send()
