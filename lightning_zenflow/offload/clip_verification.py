"""Phase *verify* of `JobQueue`, where no forward pass may see a clip factor other than the true one."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lightning_zenflow.core.step_inputs import UNCLIPPED
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.rank_state import Block, RankState, StepContext

_IN_A_ROW = 2
"""Clipped steps behind which no factor is speculated; behind a single one guessing right saves more than wrong guesses cost."""


class Verification:
    """Finds the blocks that show a step with another factor than its own, and decides whether blocks may be submitted in backward.

    A block that was submitted in backward shows the step with the factor in the block's word; the step's own is in the step's word. The
    training thread reads both when the worker has answered a job that waits for the step's word: a *correction*, which shows a block's
    tentative step once more with the step's factor, and for which the worker has nothing to do if that is the block's. What follows depends
    on factors alone, so that runs repeat.

    *Weights on the device*: the last block's correction only waits for the step's word, where no other job does. Blocks with another factor
    are submitted with the step committed, in phase *publish*; or at once, where all of them have other hyperparameters.

    *In place* a correction is published. That of the last block is submitted behind *seal*; or all of them, where they have other
    hyperparameters or the step before was clipped: they hide behind the forward pass. Others are corrected before weights are fetched.

    Attributes:
        n_clipped: applied steps up to the last one whose word was read that were clipped in a row, up to `_IN_A_ROW`.
        step: the step that phase *verify* has begun for, whose word has not been read; None: the phase has ended.
    """

    def __init__(self, rank: RankState, in_flight: JobsInFlight) -> None:
        self._rank = rank
        self._in_flight = in_flight
        # At the start nothing is speculated where a wrong guess costs something.
        self.n_clipped = 0 if rank.in_place else _IN_A_ROW
        self.step: StepContext | None = None
        # Of that step: blocks that were submitted in backward, in order; those of them that have been submitted with the true factor since.
        self._shown: Sequence[Block] = ()
        self._resubmitted: Sequence[Block] = ()

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
        """Begins the phase, behind *seal*. `shown` are the blocks that were submitted in backward, in order, with the step's
        hyperparameters if `as_shown`; if `is_awaited`, a job that commits the step is published in it. Returns the blocks that are to be
        submitted with the step committed.
        """
        last, in_place = shown[-1:], self._rank.in_place
        if in_place:
            resubmitted = corrected = last if as_shown and self.n_clipped == 0 else shown
        else:
            resubmitted, corrected = ((), last) if as_shown else (shown, ())
        # In that order: in place the worker takes the newest first.
        for block in corrected:
            self._correct(block, context.number)
        if shown or (is_awaited and not in_place):
            self._shown, self._resubmitted, self.step = shown, resubmitted, context
        return () if in_place else resubmitted

    def before_fetch(self) -> None:
        """Ends the phase before weights are fetched, in place: waits for the step's word and corrects the blocks that differ."""
        if self._rank.in_place and self.step is not None:
            self._in_flight.publish_blocks(self._shown[-1:])
            self.end(partial(self._correct, step=self.step.number))

    def end(self, correct: Callable[[Block], object] | None = None) -> None:
        """Ends the phase, if it has begun, once the step's word has arrived; with `correct` for each block that shows another factor than
        the step's own, None where all have been submitted again.
        """
        if (step := self.step) is None:
            return
        factor = self._rank.arena.word_of(step.number).view(torch.float32)[0].item()
        shown = self._rank.arena.block_words[:, 0].view(torch.float32)[[block.number for block in self._shown]]
        # A step that changes nothing must not be shown, by a factor that is not finite either.
        others = ((shown != factor) if math.isfinite(factor) else shown.isfinite()).tolist()
        for block in itertools.compress(self._shown, others):
            if correct is not None and block not in self._resubmitted:
                correct(block)
        # Behind the corrections, which are repeated if they are interrupted.
        if math.isfinite(factor):
            is_clipped = factor * step.inputs.loss_scale < UNCLIPPED
            self.n_clipped = min(self.n_clipped + 1, _IN_A_ROW) if is_clipped else 0
        self._rank.telemetry.counts.corrected_steps += any(others)
        self.step = None

    def _correct(self, block: Block, step: int) -> None:
        """Submits a block that was submitted in backward again, with the true factor. In place the next step publishes it; otherwise its
        weights are discarded.
        """
        window, in_place = block.window, self._rank.in_place
        buffer, due_step = (block.number, step + 1) if in_place else (None, step)
        assert window is not None, "its last gradient is tentative"
        with self._rank.records:
            # The block's window goes on.
            again = dataclasses.replace(window, slots=list(window.slots))
            self._in_flight.enqueue(block, again, buffer, due_step=due_step, tentative=Tentative.CORRECTION)
        self._rank.worker.send()
