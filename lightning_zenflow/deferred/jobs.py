"""The asynchronous protocol between the training thread and the worker, from the trainer's side."""

import dataclasses
from collections import deque
from collections.abc import Sequence, Set
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deferred.publish import Publisher
from lightning_zenflow.deferred.slots import SlotPool
from lightning_zenflow.deferred.window import JobCounts, UpdateJob, Window
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.telemetry.stalls import Cause
from lightning_zenflow.worker.process import JobMessage
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker


class JobQueue:
    """Owner of the windows and of the update jobs in flight.

    Each step t has these phases; the code repeats their names.

    1. *open*: every block gets a free slot for step t (`SlotPool`).
    2. *fill*: during backward, each reduced gradient is copied to the slots (d2h), in stream order behind the kernels that computed it.
    3. *seal*: behind all of these copies, in the same order, the step's factor (clip coefficient over loss scale) and then its sequence
       number are copied to the step's record. The worker polls the sequence number; its arrival happens after the arrival of everything
       before it. The training thread never waits for the copies.
    4. *submit*: the windows that close at t become jobs. From here until the job is done, its publish buffer and the block's master
       weights and moments belong to the worker, and its slots until the job that commits them is done. With d = 0, a block is submitted
       *in backward*, as soon as it is filled: step t is then *tentative*, with a predicted factor and a sequence number of the block's own
       behind its gradient (`BackwardSubmission`), and its gradient stays in the block's next window.
    5. *replay*, in the worker: wait for the sequence number of the job's last committed step, and of the block if there is a tentative
       one; apply the committed gradients in order, with their true factors; write the new weights, with the tentative gradient, in the
       model's type to the publish buffer; answer *done*. Jobs are processed in the order of their submission.
    6. *publish*: jobs that are due at t are waited for (this is the stall that is measured), and their weights are copied into the model
       (h2d); slots and publish buffers become free. No kernel of step t reads a slice's weights any more once its gradient has arrived:
       the copies are ordered behind that event in *fill*, and those of jobs that are done in time are enqueued there (`Publisher`).

    *flush* closes every open window, commits what is tentative and publishes every job; then the arena is the exact state of all steps so
    far.

    Reuse of memory. A slot or buffer that is freed in *publish* of step t is written next in *fill* or *replay* of a later step. The
    device's copies from it precede that step's sequence number in stream order, so they have been carried out by then, without any
    synchronisation. Only when a publish buffer is needed twice within one step (synchronous steps, flush) does the training thread wait
    for the device.

    Args:
        worker: processes the jobs in order, each exactly once (see `SupervisedWorker`).
        publisher: copies new weights into the model.
        schedule: S and d at the start.
        compensation: weight prediction and provisional updates of the run.
        in_backward: whether blocks may be submitted in backward.

    Attributes:
        schedule: S and d.
        counts: counters of published jobs.
        prediction_steps: steps along the momentum by which the jobs submitted last are published ahead of the exact weights.
    """

    def __init__(
        self,
        rank: RankState,
        worker: SupervisedWorker,
        slots: SlotPool,
        publisher: Publisher,
        schedule: UpdateSchedule,
        compensation: StalenessCompensation,
        *,
        in_backward: bool,
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._slots = slots
        self._publisher = publisher
        self._compensation = compensation
        self._in_backward = in_backward
        # Whether host-owned weights equal the master weights of some step at all times.
        self._publishes_exactly = not (compensation.predicts_weights or compensation.updates_provisionally)
        self.counts = JobCounts()
        self.prediction_steps = 0.0
        self._windows: list[Window | None] = [None] * len(rank.partition.blocks)
        self._in_flight: deque[UpdateJob] = deque()
        self._free_buffers: list[int] = []  # the last one freed is taken first
        self._n_buffers = self._longest = self._largest_lag = 0
        self._freed_in_step: set[int] = set()  # buffers
        self._submitted_in_backward: set[int] = set()  # blocks, in the present step
        self._published: dict[int, int] = {}
        self._next_job_id = 1
        # The sequence number is a device value as well, because it must be written in stream order behind the gradients.
        self._sequence = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.set_schedule(schedule)

    @property
    def age(self) -> int:
        """Steps after which every block has closed a window and published its job: S + d."""
        return self.schedule.update_interval + self.schedule.publish_lag

    @property
    def publishes_at_once(self) -> bool:
        """Whether every step ends with weights that have all of its gradients: S = 1, d = 0."""
        return self.age == 1

    @property
    def submitted_in_backward(self) -> Set[int]:
        """Blocks that were submitted in the backward pass of the present step; the worker is ahead of that step."""
        return self._submitted_in_backward

    def set_schedule(self, schedule: UpdateSchedule) -> None:
        """Uses another S and d from the next submission on; S is a power of two times, or a power of two'th of, the S before.

        Windows of the longer S begin and end where some of the shorter S do, so no window is ever longer than the longer S.
        """
        self.schedule = schedule
        n_blocks = len(self._windows)
        self._staggered = StaggeredSchedule.of(schedule, n_blocks=n_blocks, in_backward=self._in_backward)
        # Windows of the S before may still be open, and jobs of the d before in flight.
        self._longest = max(self._longest, schedule.update_interval)
        self._largest_lag = max(self._largest_lag, schedule.publish_lag)
        largest = dataclasses.replace(self._staggered, update_interval=self._longest, publish_lag=self._largest_lag)
        n_buffers = self._staggered.n_publish_buffers
        # In mid-run this may take seconds; a start is no stall.
        with self._rank.telemetry.stalls.measure("reserve") if self._n_buffers else nullcontext():
            self._rank.arena.reserve(n_slots=largest.n_slots, n_publish_buffers=n_buffers, touch=self._worker.touch)
        self._slots.grow(largest.n_slots)
        self._free_buffers[:0] = reversed(range(self._n_buffers, n_buffers))
        self._n_buffers = max(self._n_buffers, n_buffers)

    def open(self, step: int) -> None:
        """Phase *open*."""
        self._freed_in_step.clear()
        for block, slot in enumerate(self._slots.open()):
            window = self._windows[block]
            if window is None:
                window = self._windows[block] = Window(first_step=step)
            window.slots.append(slot)

    def seal(self, step: int, factor: Tensor) -> None:
        """Phase *seal*.

        Args:
            step: number of the step.
            factor: 0-D float32 on the device; NaN if the step changes nothing.
        """
        arena = self._rank.arena
        record = step % arena.n_step_records
        self._write_word(arena.clip[record], arena.sequence[record], step, factor)

    def submit_closing(self, step: int, *, beta1: float, synchronous: bool, drain: Set[int]) -> Sequence[int]:
        """Phase *submit*: the windows that the schedule closes, or all of them in a synchronous step.

        Args:
            step: number of the step.
            beta1: decay of the first moment; decides how far weights are predicted.
            synchronous: whether the jobs are due in this step already.
            drain: blocks that must have no other job in flight when this one is published. With a lag of a whole window or more they
                would have; their jobs, and with them all earlier ones, are then due in this step.

        Returns:
            Blocks whose windows closed.
        """
        closing = range(len(self._windows)) if synchronous else self._staggered.closing_blocks(step)
        self.prediction_steps = 0.0 if synchronous else self._compensation.prediction_steps(self.schedule, beta1)
        overlapping = self.schedule.publish_lag >= self.schedule.update_interval
        for block in closing:
            if block not in self._submitted_in_backward:
                at_once = synchronous or (overlapping and block in drain)
                due_step = step if at_once else self._staggered.publish_step(step)
                self._submit(block, due_step=due_step, prediction_steps=self.prediction_steps)
        return closing

    def can_submit_in_backward(self, block: int, step: int) -> bool:
        """Whether a block's window closes in the open step, is published in it, and has a free publish buffer."""
        closes = self._staggered.publish_lag == 0 and block in self._staggered.closing_blocks(step)
        return closes and self._windows[block] is not None and bool(self._free_buffers)

    def submit_in_backward(self, block: int, step: int, factor: Tensor, *, beta1: float) -> None:
        """Phase *submit* of one block in backward, behind its gradient, which is applied tentatively.

        Args:
            block: one that `can_submit_in_backward`.
            step: step of the backward pass.
            factor: 0-D float32 on the device, a prediction; NaN: the published weights do not have the gradient.
            beta1: see `submit_closing`.
        """
        arena = self._rank.arena
        self._write_word(arena.block_clip[block], arena.block_sequence[block], step, factor)
        self.prediction_steps = self._compensation.prediction_steps(self.schedule, beta1)
        self._submit(block, due_step=step, prediction_steps=self.prediction_steps, has_tentative=True)
        unread = runtime_of(self._rank.device).record_event()
        self._in_flight[-1].unread.append((unread, self._publisher.trained_slices(block)))
        self._submitted_in_backward.add(block)

    def next_due(self, block: int) -> int | None:
        """Step at whose end a block's weights will be overwritten by a job that is in flight now; None if there is none."""
        return min((job.due_step for job in self._in_flight if job.block == block), default=None)

    def overwrites(self, block: int, step: int) -> bool:
        """Whether a job in flight will overwrite a block's weights without the gradient of `step`."""
        return any(job.block == block and job.window.last_step < step for job in self._in_flight)

    def upload(self, new: Set[int], step: int) -> None:
        """Phase *publish* during backward, for jobs that are due at the end of the step; never waits.

        Args:
            new: slices whose gradients have arrived since the last call; their weights are neither read nor updated any more in this step.
            step: step of the backward pass.
        """
        of_job = [
            (job, slices)
            for job in self._in_flight
            if job.due_step <= step and job.block not in self._submitted_in_backward
            if (slices := self._publisher.trained_slices(job.block) & new)
        ]
        if of_job:
            unread = runtime_of(self._rank.device).record_event()
            for job, slices in of_job:
                job.unread.append((unread, slices))
        for job in self._in_flight:
            if job.completion is None:
                if not self._worker.has_answered():
                    return
                job.completion = self._worker.wait()
            if job.due_step <= step:
                self.counts.bytes_in_backward += self._publisher.upload(job)

    def publish(self, step: int) -> dict[int, int]:
        """Phase *publish*.

        Returns:
            For each block whose weights were overwritten since the last call, the last step that its weights are exact for.
        """
        due = [index for index, job in enumerate(self._in_flight) if job.due_step <= step]
        for _ in range(due[-1] + 1 if due else 0):
            self._publish_oldest(step, "publish_wait")
        self._submitted_in_backward.clear()
        published, self._published = self._published, {}
        return published

    def flush(self, step: int) -> None:
        """Closes every open window and publishes every job; arena and weights are then the exact state after `step`."""
        dropped = self._drop_open_step(step)
        for block in range(len(self._windows)):
            self._submit(block, due_step=step, cause="flush")
        while self._in_flight:
            self._publish_oldest(step, "flush")
        self._slots.free(dropped)
        if self._submitted_in_backward:
            # The step will be repeated, and the words of its blocks have arrived.
            self._rank.arena.block_sequence.zero_()
            self._submitted_in_backward.clear()
        self._published.clear()
        self._publisher.forget_ages()

    def change_ranges(self, partition: Partition) -> None:
        """Updates and publishes other ranges from now on; right after a flush only.

        Args:
            partition: `RankState.partition` with other ranges.
        """
        assert not self._in_flight, "flush comes before"
        self._rank.arena.write_ranges(partition.ranges)
        self._worker.restart()
        self._publisher.use(partition)

    def _write_word(self, clip: Tensor, sequence: Tensor, step: int, factor: Tensor) -> None:
        with self._rank.d2h.behind(reads=factor):
            clip.copy_(factor, non_blocking=True)
            # Filled on the same stream, whose copy of the number before may not have been carried out.
            sequence.copy_(self._sequence.fill_(step), non_blocking=True)
        self._rank.telemetry.traffic.d2h_bytes += factor.element_size() + self._sequence.element_size()

    def _drop_open_step(self, step: int) -> list[int]:
        """Drops the gradients of a step after `step`, whose backward pass was interrupted by an error; returns their slots.

        Jobs in flight may still read them, and publish weights that have them: their blocks are published again.
        """
        dropped = []
        for job in self._in_flight:
            # Whatever runs next may read the weights.
            job.unread.clear()
        for block, window in enumerate(self._windows):
            if window is not None and window.last_step > step:
                dropped.append(window.slots.pop())
                if not window.slots:
                    self._windows[block] = Window(first_step=step + 1) if window.n_shown else None
        return dropped

    def _submit(
        self,
        block: int,
        *,
        due_step: int,
        prediction_steps: float = 0.0,
        cause: Cause = "publish_wait",
        has_tentative: bool = False,
    ) -> None:
        """Submits a block's window. A block without one is published again, unless its weights are exact already."""
        window, self._windows[block] = self._windows[block], None
        if window is None:
            if self._publishes_exactly:
                return
            window = Window(first_step=due_step)
        while not self._free_buffers:
            # Backpressure: synchronous steps and flushes submit more jobs than the schedule has buffers for.
            self._publish_oldest(due_step, cause)
        buffer = self._free_buffers.pop()
        runtime = runtime_of(self._rank.device)
        if buffer in self._freed_in_step and runtime.runs_behind:
            with self._rank.telemetry.stalls.measure("publish_buffer"):
                runtime.current_stream().synchronize()
            self._freed_in_step.clear()
        if has_tentative:
            self._windows[block] = Window(first_step=window.last_step, slots=window.slots[-1:], n_shown=1)
        job = UpdateJob(
            job_id=self._next_job_id,
            block=block,
            window=window,
            has_tentative=has_tentative,
            due_step=due_step,
            publish_buffer=buffer,
        )
        self._next_job_id += 1
        self._worker.submit(
            JobMessage(
                job_id=job.job_id,
                block=block,
                first_step=window.first_step,
                slots=window.slots,
                publish_buffer=buffer,
                prediction_steps=prediction_steps,
                has_tentative=has_tentative,
            )
        )
        self._in_flight.append(job)

    def _publish_oldest(self, step: int, cause: Cause) -> None:
        """Waits for the oldest job, copies its weights into the model and frees its slots and its buffer."""
        job = self._in_flight.popleft()
        self.counts.in_backward += job.has_tentative
        if job.completion is None:
            self.counts.late += job.has_tentative and not self._worker.has_answered()
            with self._rank.telemetry.stalls.measure(cause):
                job.completion = self._worker.wait()
        assert job.completion.job_id == job.job_id, "the worker answers in order of submission"
        self._rank.telemetry.stalls.add_job(job.block, job.completion)
        self._publisher.finish(job)
        n = len(job.window.slots) - job.window.n_shown
        self.counts.gradients += n
        self.counts.age_steps += n * (step - job.window.last_step) + n * (n - 1) // 2
        self._slots.free(job.window.slots[: len(job.window.slots) - job.has_tentative])
        self._free_buffers.append(job.publish_buffer)
        self._published[job.block] = job.window.last_step
        self._freed_in_step.add(job.publish_buffer)
