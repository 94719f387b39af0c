"""Update jobs from their submission until their weights are in the model, and the publish buffers that they take."""

import itertools
from collections import deque
from collections.abc import Iterable, Set

from lightning_zenflow.core.device import Event, runtime_of
from lightning_zenflow.deferred.publish import Publisher
from lightning_zenflow.deferred.slots import SlotPool
from lightning_zenflow.deferred.window import JobCounts, UpdateJob, Window
from lightning_zenflow.telemetry.stalls import Cause
from lightning_zenflow.worker.process import JobMessage
from lightning_zenflow.worker.rank_state import RankState
from lightning_zenflow.worker.supervisor import SupervisedWorker

UNREAD_BUFFER = 0
"""Publish buffer of the jobs whose weights are not copied to the model, where blocks are submitted in backward; no other job uses it."""


class JobsInFlight:
    """Owner of the jobs that the worker has, or has done, in the order of their submission: phases *replay* and *publish* of `JobQueue`.

    Args:
        worker: processes the jobs in order, each exactly once (see `SupervisedWorker`).
        slots: takes back the slots that jobs have committed.
        publisher: copies new weights into the model.

    Attributes:
        counts: counters of published jobs.
    """

    def __init__(self, rank: RankState, worker: SupervisedWorker, slots: SlotPool, publisher: Publisher) -> None:
        self._rank = rank
        self._worker = worker
        self._slots = slots
        self._publisher = publisher
        self.counts = JobCounts()
        self._jobs: deque[UpdateJob] = deque()
        self._of_block: list[deque[UpdateJob]] = [deque() for _ in rank.partition.blocks]  # the same jobs, by block
        self._job_ids = itertools.count(1)
        # Free publish buffers, each with the event behind the device's last copies from it; None: the last sealed word is behind them.
        self._free_buffers: dict[int, Event | None] = {}
        self._published: dict[int, int] = {}

    def __len__(self) -> int:
        """Jobs that are not published yet."""
        return len(self._jobs)

    @property
    def awaits_answer(self) -> bool:
        """Whether the worker has a job."""
        return any(job.completion is None for job in self._jobs)

    @property
    def n_free_buffers(self) -> int:
        """Publish buffers that no job uses."""
        return len(self._free_buffers)

    def last_due_step(self, at_least: int) -> int:
        """Step at whose end the last of the jobs is due, or `at_least`."""
        return max([at_least, *(job.due_step for job in self._jobs)])

    def next_due(self, block: int) -> int | None:
        """Step at whose end a block's weights will be overwritten by a job that is in flight now; None if there is none."""
        return min((job.due_step for job in self._of_block[block] if job.is_shown), default=None)

    def overwrites(self, block: int, step: int) -> bool:
        """Whether a job in flight will overwrite a block's weights without the gradient of `step`."""
        return any(job.is_shown and job.window.last_step < step for job in self._of_block[block])

    def add_buffers(self, buffers: Iterable[int]) -> None:
        """Allows jobs to use publish buffers that they have not used so far."""
        self._free_buffers.update(dict.fromkeys(buffers))

    def next_buffer(self) -> tuple[int, Event | None]:
        """The publish buffer that has been free longest, which `enqueue` takes, and the event behind the device's last copies from it."""
        return next(iter(self._free_buffers.items()))

    def buffer_events(self) -> list[Event]:
        """Events behind the copies from all free buffers, which the caller orders the next sealed word behind."""
        return [event for event in self._free_buffers.values() if event is not None]

    def forget_buffer_events(self) -> None:
        """Notes that a sealed word is ordered behind `buffer_events`."""
        self._free_buffers = dict.fromkeys(self._free_buffers)

    def enqueue(
        self,
        block: int,
        window: Window,
        buffer: int,
        *,
        due_step: int,
        prediction_steps: float = 0.0,
        has_tentative: bool = False,
        is_shown: bool = True,
    ) -> UpdateJob:
        """Makes a window a job, which `send` sends to the worker; within `books`, together with the change of the block's window."""
        job_id = next(self._job_ids)
        submission = self._worker.enqueue(
            JobMessage(
                job_id=job_id,
                block=block,
                first_step=window.first_step,
                slots=window.slots,
                publish_buffer=buffer,
                prediction_steps=prediction_steps,
                has_tentative=has_tentative,
            )
        )
        job = UpdateJob(
            job_id=job_id,
            submission=submission,
            block=block,
            window=window,
            has_tentative=has_tentative,
            due_step=due_step,
            publish_buffer=buffer,
            is_shown=is_shown,
            held_slots=window.slots[: len(window.slots) - has_tentative],
            holds_buffer=is_shown,
        )
        if is_shown:
            del self._free_buffers[buffer]
        self._jobs.append(job)
        self._of_block[block].append(job)
        return job

    def send(self) -> None:
        """Sends the jobs that are enqueued."""
        self._worker.send()

    def upload(self, new: Set[int], step: int, *, except_blocks: Set[int]) -> None:
        """Copies weights of jobs that are done and due at the end of the step; in backward. Never waits.

        Args:
            new: slices whose weights are neither read nor updated any more in this step, since the last call.
            step: step of the backward pass.
            except_blocks: blocks whose jobs note such slices themselves (`JobQueue.submit_in_backward`).
        """
        of_job = [
            (job, slices)
            for job in self._jobs
            if job.is_shown and job.due_step <= step and job.block not in except_blocks
            if (slices := self._publisher.trained_slices(job.block) & new)
        ]
        if of_job:
            unread = runtime_of(self._rank.device).record_event()
            for job, slices in of_job:
                job.unread.append((unread, slices))
        for job in self._jobs:
            if job.completion is None:
                if not self._worker.has_answered(job.submission):
                    return
                self._take_answer(job)
            self._upload(job, step)

    def read_answer(self, cause: Cause, step: int) -> None:
        """Waits for the oldest job that has not been answered, in the backward pass of `step`."""
        job = next(job for job in self._jobs if job.completion is None)
        self._await(job, cause)
        self._upload(job, step)

    def publish_due(self, step: int) -> dict[int, int]:
        """Waits for the jobs that are due, and for all before them, and copies their weights into the model.

        Returns:
            For each block whose weights were overwritten since the last call, the last step that its weights are exact for.
        """
        due = [index for index, job in enumerate(self._jobs) if job.due_step <= step]
        for _ in range(due[-1] + 1 if due else 0):
            self.publish_oldest(step, "publish_wait")
        published, self._published = self._published, {}
        return published

    def publish_all(self, step: int) -> None:
        """Publishes every job; the model's weights are then exact."""
        while self._jobs:
            self.publish_oldest(step, "flush")
        self._published.clear()

    def publish_oldest(self, step: int, cause: Cause) -> None:
        """Waits for the oldest job, copies its weights into the model and frees its slots and its buffer."""
        job = self._jobs[0]
        if job.completion is None:
            self.counts.late += job.has_tentative and not self._worker.has_answered(job.submission)
            self._await(job, cause)
        assert job.completion is not None
        copied = None
        if job.is_shown:
            self._publisher.finish(job)
            copied = runtime_of(self._rank.device).record_event() if job.holds_buffer else None
        # After all that may fail or be interrupted: a job whose weights are not in the model yet is published again.
        with self._rank.books:
            self._jobs.popleft()
            self._of_block[job.block].popleft()
            self._free_slots(job)
            if copied is not None:
                self._free_buffers[job.publish_buffer] = copied
            if job.is_shown:
                self._published[job.block] = job.window.last_step
        self._rank.telemetry.stalls.add_job(job.block, job.completion)
        self.counts.add(job, step)

    def forget_unread(self) -> None:
        """Drops what is known about slices that the step reads no more: an interrupted step's weights may be read again."""
        for job in self._jobs:
            job.unread.clear()

    def _await(self, job: UpdateJob, cause: Cause) -> None:
        """Waits for the worker's answer to a job, the oldest without one."""
        with self._rank.telemetry.stalls.measure(cause):
            self._worker.wait_for(job.submission)
        self._take_answer(job)

    def _take_answer(self, job: UpdateJob) -> None:
        """Takes the worker's answer, and frees slots."""
        with self._rank.books:
            job.completion = job.submission.completion
            # What an earlier publish of the block overwrites may be reapplied from the slots (`ReapplyAfterPublish`).
            if self._of_block[job.block][0] is job:
                self._free_slots(job)

    def _free_slots(self, job: UpdateJob) -> None:
        self._slots.free(job.held_slots)
        job.held_slots = ()

    def _upload(self, job: UpdateJob, step: int) -> None:
        """Copies weights of an answered job in the backward pass of `step`, and frees its buffer behind the last of them."""
        if job.is_shown and job.due_step <= step:
            self.counts.bytes_in_backward += self._publisher.upload(job)
            if job.has_tentative and job.holds_buffer and job.copied is not None:
                with self._rank.books:
                    self._free_buffers[job.publish_buffer] = job.copied
                    job.holds_buffer = False
