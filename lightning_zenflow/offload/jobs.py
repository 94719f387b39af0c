"""The asynchronous protocol between the training thread and the worker, from the trainer's side."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import lru_cache, partial
from statistics import fmean

from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import Event, runtime_of
from lightning_zenflow.core.schedule import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.core.step_inputs import GroupHyperparameters, step_word
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload.clip_verification import Verification
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.rank_state import Block, RankState, SlotPool, StepContext, Window
from lightning_zenflow.telemetry import Cause
from lightning_zenflow.worker.arena import WORD_BYTES


class JobQueue:
    """Takes the blocks through the phases of a step (docs/how_it_works.md), whose names the methods have: windows become update jobs
    (`JobsInFlight`). The step's word, behind all copies to slots, has its factor (clip coefficient over loss scale) and its number; the
    worker polls it. In place a job is waited for where its weights are fetched in the next step (`await_slice`).

    `schedule` has S and d at the start. If the configuration submits in backward, and with d = 0, a block is submitted as soon as it is
    filled: the step is then *tentative*, with a predicted factor and a word of the block's own (`Fill`), and its gradient stays in the
    block's next window. Unless clipping is predicted, no forward pass may see another clip factor than the true one (`Verification`).

    Attributes:
        shows_exact: whether the last step has ended with weights that have the gradients of all steps.
        submitted_in_backward: blocks that were submitted in the present step's backward pass, in order.
    """

    def __init__(self, config: ZenFlowConfig, rank: RankState, schedule: UpdateSchedule) -> None:
        self._rank = rank
        self._worker = rank.worker
        self.slots = SlotPool(rank)
        self._compensation = compensation = config.compensation
        self._in_backward = config.submits_in_backward
        self._verifies = self._in_backward and not config.predicts_clipping
        # Whether host-owned weights equal the master weights of some step at all times.
        self._publishes_exactly = compensation.weight_prediction == 0 and not compensation.updates_provisionally
        # In place a job may begin behind the end of its step. But weights that are published again start from rounded moments, if they are:
        # which job has shown the true factor makes a difference then, and must not depend on when the worker begins.
        may_know = self._verifies and rank.in_place and not rank.arena.rounds
        self._in_backward_tentative = Tentative.TRUE_IF_KNOWN if may_know else Tentative.PREDICTED
        self.in_flight = JobsInFlight(rank, self.slots, has_scratch=self._in_backward)
        self.verification = Verification(rank, self.in_flight)
        self._longest = self._largest_lag = 0
        self._ahead = 0.0  # steps by which published weights are predicted, in the step that is submitted
        self._dropped: list[int] = []  # slots of interrupted steps, free after the next flush
        self._open_step: int | None = None  # the step that is in phase *fill*
        self.submitted_in_backward: dict[Block, None] = {}
        self.shows_exact = True
        self.set_schedule(schedule)

    def set_schedule(self, schedule: UpdateSchedule) -> None:
        """Uses another S and d from the next submission on; no window is ever longer than the longer S (`SchedulePolicy`)."""
        rank = self._rank
        self.schedule = StaggeredSchedule(
            **asdict(schedule), n_blocks=len(rank.blocks), in_backward=self._in_backward, in_place=rank.in_place
        )
        self.follow_owners()
        self._prediction_steps = lru_cache(partial(self._compensation.prediction_steps, schedule))  # by beta1
        # Windows of the S before may still be open, and jobs of the d before in flight.
        self._longest = max(self._longest, schedule.update_interval)
        self._largest_lag = max(self._largest_lag, schedule.publish_lag)
        largest = replace(self.schedule, update_interval=self._longest, publish_lag=self._largest_lag)
        n_slots, n_buffers = largest.n_slots, self.schedule.n_publish_buffers
        # In mid-run this may take seconds; a start is no stall.
        with rank.telemetry.measure("reserve") if self.slots.n_slots else nullcontext():
            rank.arena.reserve(n_slots=n_slots, n_publish_buffers=n_buffers, touch=self._worker.touch)
        self.slots.grow(n_slots)
        self.in_flight.grow_buffers(n_buffers)

    def follow_owners(self) -> None:
        """Gives jobs to the blocks that the host owns, from the next submission on; right after a flush, or where no owner has changed."""
        self._hosted = [block for block in self._rank.blocks if block.resident is None]
        of_phases = map(self.schedule.closing_blocks, range(self.schedule.update_interval))
        self._closing = [[block for block in self._hosted if block.number in numbers] for numbers in of_phases]

    def open(self, step: int) -> None:
        """Phase *open*."""
        self.verification.before_fetch()
        self._open_step = step

    def acquire(self, blocks: Iterable[Block], step: int) -> None:
        """Phase *fill*, before a gradient of these blocks is written to the slots: those without a slot for the step acquire one.

        Waits where none is free (backpressure), for jobs that need nothing that the device has not been given before. Several ranks cannot
        wait for each other here: all enqueue the same collectives in the same order, and a job's gradients depend only on those before its
        submission. So of the collectives that jobs wait for, the first is enqueued on every rank.
        """
        for block in blocks:
            if block.slot is None and block.resident is None:
                while not self.slots.free:
                    if not self.in_flight.read_answer():
                        self._commit_early(step)
                with self._rank.records:
                    block.slot = self.slots.free.pop()

    def seal(self, step: int, factor: Tensor) -> None:
        """Phase *seal*; `factor` is 0-D float32 on the device, NaN if the step changes nothing."""
        buffers = self.in_flight.free_buffers
        self._write_word(self._rank.arena.word_of(step), step_word(factor, step), behind=buffers.values())
        self.in_flight.free_buffers = dict.fromkeys(buffers)

    def submit_closing(self, context: StepContext, groups: Sequence[GroupHyperparameters]) -> None:
        """Phase *submit*: the windows that the schedule closes, or all of them in a synchronous step; `groups` are the step's
        hyperparameters, which may be others than in backward.
        """
        step = context.number
        self._end_fill(step)
        shown = list(self.submitted_in_backward)
        self._rank.telemetry.counts.steps_in_backward += bool(shown)
        self.shows_exact = context.shows_exact_weights
        closing, due_step, self._ahead = self._closing_at(step), self._due_step(step), self._steps_ahead(groups)
        if context.synchronous:
            # All windows close, and are published exactly in this step.
            closing, due_step, self._ahead = self._hosted, step, 0.0
        again: Sequence[Block] = ()
        if self._verifies:
            as_shown, is_awaited = groups == context.inputs.groups, bool(closing) and due_step == step
            again = self.verification.begin(context, shown, as_shown=as_shown, is_awaited=is_awaited)
        for block in closing:
            if block not in self.submitted_in_backward or block in again:
                self._submit(block, due_step=due_step, prediction_steps=self._ahead)

    def can_submit_in_backward(self, block: Block, step: int) -> bool:
        """Whether a block's window closes in the open step and is published in it, and no older weights are still to be shown."""
        # After a change to d = 0 an older job may be in flight, whose weights would otherwise come up behind these.
        at_once = self.schedule.publish_lag == 0 and not block.is_overwritten
        return at_once and block in self._closing_at(step)

    def submit_in_backward(self, block: Block, context: StepContext, word: Tensor) -> None:
        """Phase *submit* of a block that `can_submit_in_backward`, behind its gradient, which is applied tentatively; `word` is the
        block's, on the device, with a predicted factor, or NaN: then the published weights do not have the gradient.
        """
        step, ahead = context.number, self._steps_ahead(context.inputs.groups)
        while (buffer := self.in_flight.free_buffer(block)) is None:
            # Every job that was submitted in this backward pass gives its own back.
            answered = self.in_flight.read_answer()
            assert answered, "as many jobs are in flight as buffers are in use"
        copied = self.in_flight.free_buffers[buffer]
        self._write_word(self._rank.arena.block_words[block.number], word, behind=[copied])
        # No kernel of the step reads or updates the block's weights any more.
        overwritable = runtime_of(self._rank.device).record_event()
        with self._rank.records:
            window = block.fill(step)
            block.window = Window(first_step=step, slots=window.slots[-1:])
            self.in_flight.enqueue(
                block,
                window,
                buffer,
                due_step=self._due_step(step),
                prediction_steps=ahead,
                tentative=self._in_backward_tentative,
                overwritable=overwritable,
            )
            self.submitted_in_backward[block] = None
        self._worker.send()

    def publish(self, step: int) -> dict[Block, int]:
        """Phase *publish*, and *verify* where weights are copied; returns what `JobsInFlight.publish` does."""
        published = self.in_flight.publish(step, "publish_wait", due_only=True)
        if self.verification.step is not None and not self._rank.in_place:
            self.verification.end(
                partial(self._submit, due_step=step, prediction_steps=self._ahead, cause="correction")
            )
            published |= self.in_flight.publish(step, "correction", due_only=True)
        self.submitted_in_backward.clear()
        return published

    def flush(self, step: int) -> None:
        """Makes arena and weights the exact state after `step`. May be called again after an exception has interrupted it, or the step."""
        if self._open_step == step:
            # Interrupted behind phase *seal*.
            self._end_fill(step)
        elif self._open_step is not None:
            self._drop_open_step(step)
        self.in_flight.forget_overwritable()
        if self._rank.in_place:
            # The worker may then write to free buffers without a word of the device that orders it behind their readers.
            with self._rank.telemetry.measure("flush"):
                runtime_of(self._rank.device).synchronize()
        for block in self._hosted:
            self._submit(block, due_step=step, cause="flush")
        self.in_flight.publish(step, "flush", due_only=False)
        self.verification.end()
        with self._rank.records:
            self.slots.free += self._dropped
            self._dropped.clear()
        self._forget_words(step + 1)
        self.submitted_in_backward.clear()
        self._check_integrity()

    def _check_integrity(self) -> None:
        """Asserts what holds after a flush: nothing is under way, and each slot and buffer is free or has one owner."""
        assert not any(block.window or block.jobs for block in self._rank.blocks), "windows and jobs are published"
        # Micro-batches that were accumulated in host memory keep theirs.
        acquired = [block.slot for block in self._rank.blocks if block.slot is not None]
        assert sorted(acquired + self.slots.free) == list(range(self.slots.n_slots)), "each slot has one owner"
        self.in_flight.check_integrity()

    def _forget_words(self, step: int) -> None:
        """Forgets words of a step whose backward pass or end was interrupted: they would match when the step is repeated."""
        with self._rank.telemetry.measure("flush"):
            # One that no job has waited for may still be on its way.
            runtime_of(self._rank.device).synchronize()
        self._rank.arena.block_words.zero_()
        self._rank.arena.word_of(step).zero_()

    def await_slice(self, index: int) -> None:
        """Phase *publish* of the blocks of one slice, whose weights are about to be fetched; in place."""
        if self.verification.is_in_doubt:
            self.verification.before_fetch()
        self.in_flight.publish_blocks(self._rank.blocks.of_slice[index])

    def is_written(self, index: int) -> bool:
        """Whether `await_slice` would return at once; reads the answers that are there."""
        answered = map(self.in_flight.has_answers, self._rank.blocks.of_slice[index])
        return not self.verification.is_in_doubt and all(answered)

    def follow_trained(self) -> None:
        """Lets the worker update what `RankState.trained` has from now on; right after a flush only."""
        self._check_integrity()
        self._rank.arena.write_trained(self._rank.trained)
        self._worker.restart()

    def _write_word(self, to: Tensor, word: Tensor, *, behind: Iterable[Event | None]) -> None:
        """Copies a word to its place, in the device's order `behind` its last copies from the buffers that the word's jobs write: nobody
        waits for them. Where the word was written before its job is submitted, `JobsInFlight.await_buffer` waits.
        """
        for event in behind:
            if event is not None:
                self._rank.d2h.wait_for(event)
        with self._rank.d2h.behind(reads=word):
            to.copy_(word, non_blocking=True)
        self._rank.telemetry.d2h_bytes += WORD_BYTES

    def _closing_at(self, step: int) -> Sequence[Block]:
        return self._closing[step % len(self._closing)]

    def _steps_ahead(self, groups: Sequence[GroupHyperparameters]) -> float:
        return self._prediction_steps(fmean(group.beta1 for group in groups))

    def _due_step(self, step: int) -> int:
        # In place: the end of the next step, if nothing fetches the weights before.
        return step + self.schedule.publish_lag + self._rank.in_place

    def _end_fill(self, step: int) -> None:
        """Ends phase *fill*: the gradients of all blocks that are not submitted yet belong to their windows."""
        with self._rank.records:
            for block in self._rank.blocks:
                if block.slot is not None and block not in self.submitted_in_backward:
                    block.fill(step)
                block.slot = None
            self._open_step = None

    def _commit_early(self, step: int) -> None:
        """Commits what the windows hold that `step`, which is being filled, closes; or if there are none, what all windows hold: where
        steps are accumulated in host memory, or a step does not submit in backward while windows hold gradients that are shown already. It
        depends on the order of arrival alone, never on the worker's speed: runs repeat.
        """
        held = [b for b in self._rank.blocks if (w := b.window) and w.slots and w.last_step < step]
        closing = [b for b in held if b in self._closing_at(step)]
        assert held and self._in_backward, "the schedule bounds the number of slots in use"
        for block in closing or held:
            window = block.window
            assert window is not None
            with self._rank.records:
                block.window = Window(first_step=step)
                self.in_flight.enqueue(block, window, None, due_step=self._due_step(step))
            self._worker.send()

    def _drop_open_step(self, step: int) -> None:
        """Drops the gradients of the step after `step`. Jobs in flight may still read them, and publish weights that have them: their
        blocks are published again.
        """
        with self._rank.records:
            for block in self._rank.blocks:
                if block.slot is not None and block not in self.submitted_in_backward:
                    self._dropped.append(block.slot)
                block.slot = None
                if block.window is not None and block.window.last_step > step:
                    self._dropped += block.window.slots
                    block.window = Window(first_step=step + 1)
            self._open_step = None

    def _submit(
        self, block: Block, *, due_step: int, prediction_steps: float = 0.0, cause: Cause = "publish_wait"
    ) -> None:
        """Submits a block's window. A block without one is published again, unless its weights are exact already."""
        window = block.window
        if window is None:
            if self._publishes_exactly:
                return
            window = Window(first_step=due_step)
        buffer = self.in_flight.await_buffer(block, cause, due_step=due_step)
        with self._rank.records:
            block.window = None
            self.in_flight.enqueue(block, window, buffer, due_step=due_step, prediction_steps=prediction_steps)
        self._worker.send()
