"""Update jobs, from the end of a window until its weights are in the model; and the way of the new weights into it."""

import itertools
from collections import deque
from collections.abc import Iterable, Set

import torch

from lightning_zenflow.core.device import Event, SideStream, runtime_of
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload.rank_state import Block, Job, RankState, SlotPool, Window
from lightning_zenflow.telemetry import Cause
from lightning_zenflow.worker.process import JobMessage


class JobsInFlight:
    """Owner of the jobs that are not published yet, in the order of their submission, and of the publish buffers: phases *replay* and
    *publish* of `JobQueue`. It alone changes a job. Jobs of one block are published in their order.

    New weights are copied from publish buffers into the model during backward, slice by slice, or at the end of the step. Copies in
    backward are ordered behind an event on a stream of their own, so a device that runs behind the host makes them in backward, even where
    the host enqueues them at the end of the step.

    *In place* (`RankState.in_place`; docs/how_it_works.md, "Weights in place") nothing is copied: block b publishes to buffer b; the buffer
    behind them is that of discarded weights. A job owns its block's weights from its submission until *done*, and writes them while
    backward may still be running, behind the step's last reads of them by kernels, or by copies that kernels wait for. A copy that nothing
    waits for may read a mixture.

    With `has_scratch` there are jobs whose weights are discarded, which have a buffer of their own.

    Attributes:
        free_buffers: buffers that no job uses, the one that has been free longest first, each with the event behind the device's last
            copies from it; None: a step has been sealed behind them.
    """

    def __init__(self, rank: RankState, slots: SlotPool, *, has_scratch: bool) -> None:
        self._rank = rank
        self._worker = rank.worker
        self._slots = slots
        self._copies = SideStream(rank.device)
        self._n_buffers = 0
        self._scratch = (len(rank.blocks) if rank.in_place else 0) if has_scratch else None
        self.free_buffers: dict[int, Event | None] = {}
        self._jobs: deque[Job] = deque()
        # Those of them whose answer has not been taken: the worker owns the state of their blocks, their slots and their buffers.
        self._unanswered: deque[Job] = deque()
        self._job_ids = itertools.count(1)
        self._published: dict[Block, int] = {}
        self._worker.diagnosis = self._diagnosis

    def grow_buffers(self, n_buffers: int) -> None:
        """Allows jobs to use the arena's first `n_buffers` buffers."""
        new = (buffer for buffer in range(self._n_buffers, n_buffers) if buffer != self._scratch)
        self.free_buffers.update(dict.fromkeys(new))
        self._n_buffers = max(self._n_buffers, n_buffers)

    def check_integrity(self) -> None:
        """Asserts that no job is in flight and that all buffers are free."""
        assert not self._jobs and not self._unanswered, "jobs are published"
        assert self.free_buffers.keys() == set(range(self._n_buffers)) - {self._scratch}, "each buffer has one owner"

    def free_buffer(self, block: Block) -> int | None:
        """Of `free_buffers` the one for a block's next job; None: there is none for it."""
        if self._rank.in_place:
            return block.number if block.number in self.free_buffers else None
        return next(iter(self.free_buffers), None)

    def enqueue(
        self,
        block: Block,
        window: Window,
        buffer: int | None,
        *,
        due_step: int,
        prediction_steps: float = 0.0,
        tentative: Tentative = Tentative.NONE,
        overwritable: Event | None = None,
    ) -> None:
        """Makes a block's window a job, which `SupervisedWorker.send` sends; within `records`, together with the change of the window.

        `buffer` is the block's `free_buffer`, or None: the weights are discarded; in place a correction has that of the job in backward.
        The weights are `prediction_steps` along the momentum ahead of the exact ones. A job in backward has `overwritable`, the event from
        which on no kernel of the step reads or updates the block's weights.
        """
        holds_buffer = buffer is not None and tentative is not Tentative.CORRECTION
        target = self._scratch if buffer is None else buffer
        assert target is not None, "only blocks that are submitted in backward discard weights"
        submission = self._worker.enqueue(
            JobMessage(
                job_id=next(self._job_ids),
                block=block.number,
                first_step=window.first_step,
                slots=window.slots,
                publish_buffer=target,
                prediction_steps=prediction_steps,
                tentative=tentative,
            )
        )
        is_copied = buffer is not None and not self._rank.in_place
        slices = block.slices.keys() & self._rank.trained.keys() if is_copied else set()
        job = Job(
            block=block,
            window=window,
            tentative=tentative,
            due_step=due_step,
            buffer=buffer,
            submission=submission,
            holds_buffer=holds_buffer,
            read=slices if overwritable is None else set(),
            overwritable=[] if overwritable is None else [(overwritable, slices)],
        )
        if holds_buffer:
            assert buffer is not None
            del self.free_buffers[buffer]
        for jobs in (self._jobs, self._unanswered, block.jobs):
            jobs.append(job)

    def poll(self, step: int, new: Set[int]) -> None:
        """Reads the answers that are there, and copies weights of jobs that are done and due at the end of the step; in backward. Never
        waits. `new` are slices whose weights the step neither reads nor updates any more, since the last call.
        """
        changed: list[Job] = []
        overwritable: Event | None = None
        for block in dict.fromkeys(block for index in new for block in self._rank.blocks.of_slice[index]):
            for job in block.jobs:
                if job.due_step <= step and (slices := job.read & new):
                    overwritable = overwritable or runtime_of(self._rank.device).record_event()
                    job.overwritable.append((overwritable, slices))
                    job.read -= slices
                    changed.append(job)
        while self._unanswered and self._worker.has_answered(self._unanswered[0].submission):
            changed.append(self._take_answer(self._unanswered[0]))
        for job in changed + self._take_newer_answers():
            self._publish_in_backward(job)

    def read_answer(self) -> bool:
        """Waits for the answer to one of the jobs; in backward. False if the worker has none."""
        if not self._unanswered:
            return False
        self._wait_for(self._unanswered, "slot")
        for job in self._take_newer_answers() or [self._take_answer(self._unanswered[0])]:
            self._publish_in_backward(job)
        return True

    def publish(self, step: int, cause: Cause, *, due_only: bool) -> dict[Block, int]:
        """Waits for all jobs, or for those that are due and all before them, and publishes them. Returns for each block whose weights were
        overwritten since the last call the last step that they are exact for.
        """
        due = [index for index, job in enumerate(self._jobs) if job.due_step <= step or not due_only]
        for _ in range(due[-1] + 1 if due else 0):
            self._publish(self._jobs[0], cause)
        published, self._published = self._published, {}
        return published

    def publish_blocks(self, blocks: Iterable[Block]) -> None:
        """Waits for all jobs of these blocks, so that the weights are those of the last one submitted."""
        for block in blocks:
            while block.jobs:
                self._publish(block.jobs[0], "publish_wait")

    def has_answers(self, block: Block) -> bool:
        """Whether the worker has done all jobs of a block."""
        return all(self._worker.has_answered(job.submission) for job in block.jobs)

    def await_buffer(self, block: Block, cause: Cause, *, due_step: int) -> int:
        """`free_buffer`, one that the device does not use either, for a job that is due at `due_step`; waits until there is one."""
        jobs = block.jobs if self._rank.in_place else self._jobs
        # Synchronous and clipped steps and flushes submit more jobs than the schedule has buffers for: the oldest one, or the one that has
        # it. Its copies end while the worker is awaited once more, where another job is due, and is not the last that the worker has.
        while True:
            buffer = self.free_buffer(block)
            copied = None if buffer is None else self.free_buffers[buffer]
            if buffer is not None and (copied is None or copied.query()):
                return buffer
            if buffer is None or (len(jobs) > 1 and jobs[0].due_step <= due_step):
                self._publish(jobs[0], cause)
            elif copied is not None:
                with self._rank.telemetry.measure("publish_buffer"):
                    copied.synchronize()
                return buffer

    def _publish(self, job: Job, cause: Cause) -> None:
        """Waits for a job, its block's oldest, copies its weights into the model and frees its slots and its buffer."""
        counts, in_backward = self._rank.telemetry.counts, self._is_shown_tentatively(job)
        if job in self._unanswered:
            counts.late_jobs += in_backward and not self._worker.has_answered(job.submission)
            self._wait_for([job], cause)
            self._take_answer(job)
        copied = None
        if job.buffer is not None:
            self._copy_overwritable(job)
            if job.is_partly_published:
                # Later work of the current stream, which may reuse the buffer, is behind these copies.
                self._copies.join()
            self._copy(job, job.read)
            copied = runtime_of(self._rank.device).record_event() if job.holds_buffer else None
        # After all that may fail or be interrupted: a job whose weights are not in the model yet is published again.
        with self._rank.records:
            self._jobs.remove(job)
            job.block.jobs.popleft()
            if job.buffer is not None:
                self._published[job.block] = job.window.last_step
                if copied is not None:
                    self.free_buffers[job.buffer] = copied
        counts.in_backward_jobs += in_backward

    def forget_overwritable(self) -> None:
        """Forgets which slices the step reads no more: an interrupted step's weights may be read again."""
        for job in self._jobs:
            job.read.update(*(slices for _, slices in job.overwritable))
            job.overwritable.clear()

    def _is_shown_tentatively(self, job: Job) -> bool:
        """Whether a block's weights in the model will be those of this job, with a tentative gradient."""
        shown = next((other for other in reversed(job.block.jobs) if other.buffer is not None), None)
        return job.tentative is not Tentative.NONE and shown is job

    def _wait_for(self, jobs: Iterable[Job], cause: Cause) -> None:
        """Waits for the worker's answer to one of the jobs."""
        with self._rank.telemetry.measure(cause):
            self._worker.wait_for(*(job.submission for job in jobs))

    def _diagnosis(self) -> str:
        """All that a wait for the worker may depend on."""
        n_answered = len(self._jobs) - len(self._unanswered)
        oldest = next((f"; the oldest: {job.submission.message}" for job in self._unanswered), "")
        return (
            f"{n_answered} jobs answered, {len(self._unanswered)} jobs submitted; {len(self._slots.free)} of {self._slots.n_slots} slots"
            f" and {len(self.free_buffers)} of {self._n_buffers} publish buffers free{oldest}"
        )

    def _take_newer_answers(self) -> list[Job]:
        """Takes answers that have been read while an older job has none: only where the worker takes the newest first."""
        if not self._rank.in_place:
            return []
        return [self._take_answer(job) for job in list(self._unanswered) if job.submission.is_answered]

    def _take_answer(self, job: Job) -> Job:
        """Takes the worker's answer, and frees the slots of the gradients that are committed."""
        n_committed = len(job.window.slots) - (job.tentative is not Tentative.NONE)
        with self._rank.records:
            self._unanswered.remove(job)
            self._slots.free += job.window.slots[:n_committed]
        return job

    def _publish_in_backward(self, job: Job) -> None:
        """Copies weights of an answered job that may be overwritten. A job in backward gives back its buffer behind the last of them."""
        if job in self._unanswered or job.buffer is None:
            return
        self._copy_overwritable(job)
        if job.tentative is not Tentative.NONE and job.holds_buffer and not job.read:
            copied = self._copies.record_event()
            with self._rank.records:
                self.free_buffers[job.buffer] = copied
                job.holds_buffer = False

    def _copy_overwritable(self, job: Job) -> None:
        """Enqueues copies of the slices that may be overwritten."""
        for event, slices in job.overwritable:
            job.is_partly_published = True
            with self._copies.behind(event):
                self._copy(job, slices)
        job.overwritable.clear()

    def _copy(self, job: Job, slices: Iterable[int]) -> None:
        """Copies the new weights of some slices from the job's buffer into the model, on the current stream."""
        # Neighbours of one parameter group are one copy.
        ranges: list[tuple[int, int, int]] = []
        for group, begin, end in (job.block.slices[number] for number in sorted(slices)):
            if ranges and (ranges[-1][0], ranges[-1][2]) == (group, begin):
                begin = ranges.pop()[1]
            ranges.append((group, begin, end))
        if ranges:
            targets = [self._rank.weights_at(group, begin, end - begin) for group, begin, end in ranges]
            new_weights, first = self._rank.arena.publish[job.buffer], job.block.begin
            sources = [new_weights[begin - first : end - first] for _, begin, end in ranges]
            self._rank.telemetry.h2d_bytes += sum(source.nbytes for source in sources)
            torch._foreach_copy_(targets, sources, non_blocking=True)
