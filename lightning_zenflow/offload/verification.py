"""Phase *verify* of `JobQueue`: no forward pass sees a clip factor other than the true one, although blocks are submitted in backward."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_zenflow.native.protocol import Tentative
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.rank_state import Block, RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker

_UNCLIPPED = 1 - 2**-20
"""Smallest clip coefficient of a step without clipping: 1 but for the rounding of the factor."""


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
    and the worker has nothing to do if that is the block's. What follows depends on factors alone, so that runs repeat.

    Args:
        in_flight: takes the corrections.
        verifies: whether there is such a phase; false where forward passes may see predicted factors.
        in_place: whether the weights are where the worker writes them (`InPlacePublisher`). A correction is then published. Otherwise it
            only waits for the word, and `JobQueue` submits blocks with another factor again.

    Attributes:
        clipped: whether the last applied step was clipped. Where nothing is known of it: whether a factor in doubt makes the step wait.
        step: the step that phase *verify* has begun for; None: it has ended.
        n_corrected: steps so far that some block has shown, or would have shown, with another factor than the true one.
    """

    def __init__(
        self, rank: RankState, worker: SupervisedWorker, in_flight: JobsInFlight, *, verifies: bool, in_place: bool
    ) -> None:
        self._verifies = verifies
        self._rank = rank
        self._worker = worker
        self._in_flight = in_flight
        self._in_place = in_place
        self.clipped = not in_place
        self.step: ShownStep | None = None
        self._differs = False  # whether some block of the step had another factor
        self.n_corrected = 0

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
        self._differs, one = False, shown[-1:]
        # In place they hide behind the forward pass, which would otherwise wait for the first answer.
        all_differ = not as_shown or (self._in_place and self.clipped)
        resubmitted = shown if all_differ else one if self._in_place else ()
        if self._in_place or as_shown:
            self._correct(step, resubmitted or one)
        if shown or (is_awaited and not self._in_place):
            self.step = ShownStep(number=step, loss_scale=loss_scale, blocks=shown, resubmitted=resubmitted)
        else:
            self.clipped, self.step = not self._in_place, None
        return () if self._in_place else resubmitted

    def wrong(self) -> list[Block]:
        """Blocks of `step` that show another factor than its own and have not been submitted since; once the step's word has arrived."""
        if self.step is None:
            return []
        others = self._with_other_factors(self.step)
        self._differs = bool(others)
        return [block for block in others if block not in self.step.resubmitted]

    def correct_word(self, block: Block) -> None:
        """Makes the true factor the block's, which the worker reads for the block's next job; no job of the block may be in flight."""
        assert self.step is not None and not block.jobs, "`wrong` comes before"
        words = self._rank.arena
        words.block_words.copy_factor(block.number, words.step_words, self.step.number)

    def end(self) -> None:
        """Ends the phase, where no block of `step` shows another factor any more."""
        if self.step is None:
            return
        factor = self._rank.arena.step_words.factor(self.step.number)
        if math.isfinite(factor):
            self.clipped = factor * self.step.loss_scale < _UNCLIPPED
        self.n_corrected += self._differs
        self.step = None

    def run_in_place(self) -> None:
        """Waits for the step's word and corrects the blocks that differ, before a forward pass fetches their weights."""
        if self.step is not None:
            self._in_flight.publish_blocks(self.step.blocks[-1:], "publish_wait")
            self._correct(self.step.number, self.wrong())
            self.end()

    def _with_other_factors(self, step: ShownStep) -> list[Block]:
        factor = self._rank.arena.step_words.factor(step.number)
        shown = self._rank.arena.block_words.clip[[block.number for block in step.blocks]]
        # A step that changes nothing must not be shown, by a factor that is not finite either.
        others = (shown != factor) if math.isfinite(factor) else shown.isfinite()
        return [block for block, is_other in zip(step.blocks, others.tolist(), strict=True) if is_other]

    def _correct(self, step: int, blocks: Iterable[Block]) -> None:
        """Submits again, with the true factor, blocks that were submitted in backward; in that order: in place the worker takes the newest
        first.
        """
        for block in blocks:
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
