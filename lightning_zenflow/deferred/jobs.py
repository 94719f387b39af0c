"""The asynchronous protocol between training and the worker, from the trainer's side."""

from collections import deque
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, blocks_of_tiles
from lightning_zenflow.deferred.publish import PublishedWeights
from lightning_zenflow.deferred.slots import SlotViews
from lightning_zenflow.deferred.window import JobCounts, Publishing, UpdateJob, Window
from lightning_zenflow.native.protocol import Rule
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.stalls import Cause, StallClock
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.process import JobMessage
from lightning_zenflow.worker.supervisor import SupervisedWorker


class JobQueue:
    """Runs the deferred updates. Each step t goes through these phases; the code repeats their names.

    1. *open*: every block gets a free slot for step t.
    2. *fill*: during backward, each reduced gradient is copied to its tiles' places in the slots, in stream order behind the kernels
       that made it; those of small vectors together, when their block is handed over or at the end (`VectorGradients`).
    3. *seal*: behind all of them, in the same order, the step's factor (clip coefficient over loss scale) and then its number are
       copied to the step's record. The number is what tells the worker that everything before it has arrived; the training
       thread never waits for the copies.
    4. *hand over*: the windows that close at t become jobs and are submitted. From here until the round is done, its slots, its publish
       buffer and the block's master weights and moments belong to the worker. With S = 1, d = 0 and a factor that is known beforehand, a
       block is handed over *early*: in backward, as soon as it is filled, with a factor and a number of its own behind its gradient
       (`BackwardSubmission`).
    5. *replay*, in the worker: wait for the number of the round's last step (an early round: the block's); apply the S gradients in order;
       write the new weights, in the model's type, to the publish buffer; answer *done*. JobQueue are worked off in the order of submission.
    6. *publish*: jobs that are due at t are waited for (this is the stall that is measured) and their weights are copied into the
       model; slots and buffers become free. What provisional updates of later steps had moved is moved again (`ReapplyAfterPublish`). Of
       jobs that were done in time, most has been copied before, in *fill* of t, behind the rest of backward and on a stream of its own: a
       slice's weights are not read any more in t once its gradient is there.

    *flush* closes every open window and publishes every round, so that the arena is the exact state of all steps so far.

    A slot or buffer freed in *publish* of step t is written next in *fill* or *replay* of a later step, and the device's copies from it
    come earlier in stream order than that step's number; so its data has been read by then, without any synchronisation. Only
    when the same buffer is needed twice within one step (synchronous steps, flush) must the device be waited for.

    Args:
        partition: the rank's partition.
        arena: shared memory.
        worker: carries the jobs out, in order and each once, whatever happens to its process (see `SupervisedWorker`).
        schedule: S and d at the start.
        publishing: how windows become weights.
        weights: for each parameter group, the rank's flat partition of the model's weights, on the device.
        stalls: where waiting is counted.
        tracer: records the copies.
        traffic: where copied bytes are counted.

    Attributes:
        counts: what was published since the start.
        prediction_steps: steps along the momentum by which the last jobs' weights run ahead of the exact ones.
    """

    def __init__(
        self,
        partition: Partition,
        *,
        arena: Arena,
        worker: SupervisedWorker,
        schedule: UpdateSchedule,
        publishing: Publishing,
        weights: Sequence[Tensor],
        stalls: StallClock,
        tracer: Tracer,
        traffic: Traffic,
    ) -> None:
        self._arena = arena
        self._worker = worker
        self._publishing = publishing
        self._n_updates = [0] * len(partition.blocks)
        self._stalls = stalls
        self._traffic = traffic
        self.counts = JobCounts()
        self._device = weights[0].device
        self._block_of_tile = blocks_of_tiles(partition)
        self._published_weights = PublishedWeights(partition, arena, weights, tracer)
        self._windows: list[Window | None] = [None] * len(partition.blocks)
        self._in_flight: deque[UpdateJob] = deque()
        # The last one freed is taken first, so that no more memory is ever touched than a schedule needs.
        self._free_slots: list[int] = []
        self._free_buffers: list[int] = []
        self._prepared: list[int] = []
        self._slot_views = SlotViews(partition, arena)
        self._n_slots = self._n_buffers = self._longest = self._largest_lag = 0
        self._published_now: set[int] = set()
        self._passed: set[int] = set()  # slices whose gradient of the present step is there
        self._early_blocks: set[int] = set()  # handed over in the present step's backward
        self._published_blocks: dict[int, int] = {}
        self._next_job_id = 1
        self.prediction_steps = 0.0
        # For each block the step that its weights are exact for, but for what was moved since; None after a flush, until the next gradient.
        self._exact_for: list[int | None] = [None] * len(partition.blocks)
        # The record's sequence word is a device value too: it must be written in stream order behind the gradients.
        self._sequence = torch.zeros((), dtype=torch.int64, device=self._device)
        self.set_schedule(schedule)

    @property
    def age(self) -> int:
        """Steps after which every block has had a window closed and its round published: S + d."""
        return self._staggered.update_interval + self._staggered.publish_lag

    @property
    def publishes_at_once(self) -> bool:
        """Whether every step ends with weights that have all of its gradients: S = 1, d = 0."""
        return self.age == 1

    @property
    def is_ahead(self) -> bool:
        """Whether the worker has parts of a step that has not ended."""
        return bool(self._early_blocks)

    def set_schedule(self, schedule: UpdateSchedule) -> None:
        """Uses another S and d from the next hand-over on; S is a power of two times or a power of two'th of the S before.

        Windows of the longer S begin and end where some of the shorter S do, so no window is ever longer than the longer S.
        """
        self.schedule = schedule
        n_blocks, s, d = len(self._windows), schedule.update_interval, schedule.publish_lag
        self._staggered = StaggeredSchedule(n_blocks=n_blocks, update_interval=s, publish_lag=d)
        # Windows of the S before may still be open, and jobs of the d before in flight.
        self._longest, self._largest_lag = max(self._longest, s), max(self._largest_lag, d)
        n_slots = StaggeredSchedule(
            n_blocks=n_blocks, update_interval=self._longest, publish_lag=self._largest_lag
        ).n_slots
        n_buffers = self._staggered.n_publish_buffers
        self._arena.reserve(n_slots=n_slots, n_publish_buffers=n_buffers)
        self._free_slots[:0] = reversed(range(self._n_slots, n_slots))
        self._free_buffers[:0] = reversed(range(self._n_buffers, n_buffers))
        self._n_slots, self._n_buffers = max(self._n_slots, n_slots), max(self._n_buffers, n_buffers)

    @property
    def n_updates(self) -> list[int]:
        """For each block the number of jobs with gradients so far, for a checkpoint."""
        return list(self._n_updates)

    @n_updates.setter
    def n_updates(self, values: Sequence[int]) -> None:
        self._n_updates = list(values)

    def prepare(self) -> None:
        """Takes the next step's slots before its *open*, for gradients that are added up there. No part of a window yet: a flush in between
        leaves them alone.
        """
        if not self._prepared:
            assert len(self._free_slots) >= len(self._windows), "the schedule promised enough slots"
            self._prepared = [self._free_slots.pop() for _ in self._windows]

    def open(self, step: int) -> None:
        """Phase *open*."""
        self._published_now.clear()
        self._passed.clear()
        self.prepare()
        for block, slot in enumerate(self._prepared):
            window = self._windows[block]
            if window is None:
                window = self._windows[block] = Window(first_step=step)
            window.slots.append(slot)
        self._prepared = []

    def slot(self, tile_index: int) -> Tensor:
        """Phase *fill*: where a tile's gradient of the step goes that is open or prepared.

        Args:
            tile_index: index into `Partition.tiles`.

        Returns:
            [rows, width], model dtype, on the host: to be written in stream order.
        """
        block = self._block_of_tile[tile_index]
        if self._prepared:
            slot = self._prepared[block]
        else:
            window = self._windows[block]
            assert window is not None, "open comes before fill"
            slot = window.slots[-1]
        return self._slot_views.view(tile_index, slot)

    def seal(self, step: int, factor: Tensor) -> None:
        """Phase *seal*.

        Args:
            step: number of the step.
            factor: 0-D float32 on the device; NaN if the step changes nothing.
        """
        record = step % self._arena.n_step_records
        self._write_word(self._arena.clip[record], self._arena.sequence[record], step, factor)

    def submit_closing(self, step: int, *, beta1: float, synchronous: bool, drain: Callable[[int], bool]) -> list[int]:
        """Phase *hand over*: the windows that the schedule closes, or all of them in a synchronous step.

        Args:
            step: number of the step.
            beta1: decay of the first moment, which decides how far to look ahead.
            synchronous: whether the jobs are due in this step already.
            drain: whether a block must have no other round in flight when this one is published; with a lag of a whole window or more it
                has one otherwise, so that block's round, and with it all earlier ones, are then due in this step.

        Returns:
            The blocks whose windows closed.
        """
        closing = list(range(len(self._windows)) if synchronous else self._staggered.closing_blocks(step))
        self.prediction_steps = 0.0 if synchronous else self._publishing.prediction.steps_ahead(self.schedule, beta1)
        # Mean gradients cannot be taken back from columns that leave the device: nothing may come between its window and the change.
        alone = self._publishing.rule is Rule.REPLAY and self._staggered.publish_lag < self._staggered.update_interval
        for block in closing:
            if block in self._early_blocks:
                continue
            now = synchronous or (not alone and drain(block))
            self._submit(
                block,
                due_step=step if now else self._staggered.publish_step(step),
                prediction_steps=self.prediction_steps,
            )
        return closing

    def slices_of(self, block: int) -> Set[int]:
        """The slices that a block has a part of, as far as they are trained."""
        return self._published_weights.slices_of(block)

    def can_submit_in_backward(self, block: int) -> bool:
        """Whether a block's window has the open step alone, and a publish buffer is free; not right after a change of schedule."""
        window = self._windows[block]
        return self.publishes_at_once and window is not None and len(window.slots) == 1 and bool(self._free_buffers)

    def submit_in_backward(self, block: int, step: int, factor: Tensor) -> None:
        """Phase *hand over* of one block in backward, behind its gradient.

        Args:
            block: that `can_submit_in_backward`.
            step: the step whose backward is under way.
            factor: 0-D float32 on the device; NaN if the step changes nothing in the block.
        """
        self._write_word(self._arena.block_clip[block], self._arena.block_sequence[block], step, factor)
        self._submit(block, due_step=step, early=True)
        self._in_flight[-1].filled = self._published_weights.mark()
        self._early_blocks.add(block)

    def was_submitted(self, tile_index: int) -> bool:
        """Whether a tile's block has been handed over early in the open step."""
        return self._block_of_tile[tile_index] in self._early_blocks

    def block_of(self, tile_index: int) -> int:
        """The block that a tile of the partition lies in."""
        return self._block_of_tile[tile_index]

    def gradient_age(self, tile_index: int, step: int) -> int:
        """How many gradients a tile's weights in the model are behind, the step's own included: 1 right after their round's last."""
        block = self._block_of_tile[tile_index]
        exact_for = self._exact_for[block]
        if exact_for is None:
            exact_for = self._exact_for[block] = step - 1
        return step - exact_for

    def next_due(self, tile_index: int) -> int | None:
        """The step at whose end a tile's weights will be overwritten by a round that is in flight now; None if there is none."""
        block = self._block_of_tile[tile_index]
        return min((job.due_step for job in self._in_flight if job.block == block), default=None)

    def publish_in_backward(self, slices: Set[int], step: int) -> None:
        """Phase *publish* for the slices of this step so far, as far as jobs are due at its end and done; never waits.

        Args:
            slices: indexes into `Partition.slices` that come to those of earlier calls; their weights are not read any more in this step,
                nor moved by the stand-in.
            step: the step whose backward is under way.
        """
        self._passed.update(slices)
        for job in self._in_flight:
            of_block = self._published_weights.slices_of(job.block)
            new = slices
            if job.completion is None:
                if not self._worker.has_answered():
                    return
                job.completion = self._worker.wait()
                new = self._passed
            ready = of_block & new
            if not ready or job.due_step > step:
                continue
            n_bytes = self._published_weights.copy_in_backward(job.block, job.publish_buffer, ready)
            job.early |= ready
            self._traffic.h2d_bytes += n_bytes
            self.counts.bytes_in_backward += n_bytes

    def publish(self, step: int) -> dict[int, int]:
        """Phase *publish*: returns the blocks whose weights were overwritten since the last call, and the last step that those are of."""
        due = [index for index, job in enumerate(self._in_flight) if job.due_step <= step]
        for _ in range(due[-1] + 1 if due else 0):
            self._publish_oldest(step, "publish_wait")
        self._early_blocks.clear()
        published, self._published_blocks = self._published_blocks, {}
        return published

    def flush(self, step: int) -> None:
        """Closes every open window and publishes every round; arena and weights are then the exact state after `step`."""
        self._drop_open_step(step)
        for block in range(len(self._windows)):
            self._submit(block, due_step=step, cause="flush")
        while self._in_flight:
            self._publish_oldest(step, "flush")
        self._published_blocks.clear()
        self._exact_for = [None] * len(self._exact_for)

    def change_ranges(self, partition: Partition) -> None:
        """Updates and publishes other ranges from now on; right after a flush only.

        Args:
            partition: as before but for its ranges.
        """
        assert not self._in_flight, "flush comes before"
        self._arena.write_ranges(partition.ranges)
        self._worker.restart()
        self._published_weights.use(partition)

    def _write_word(self, clip: Tensor, sequence: Tensor, step: int, factor: Tensor) -> None:
        clip.copy_(factor, non_blocking=True)
        sequence.copy_(self._sequence.fill_(step), non_blocking=True)
        self._traffic.d2h_bytes += factor.element_size() + self._sequence.element_size()

    def _drop_open_step(self, step: int) -> None:
        """Forgets what has been filled of a step after this one, whose backward was interrupted by an error."""
        assert not self.is_ahead, "the worker's part of that step cannot be taken back"
        for block, window in enumerate(self._windows):
            if window is not None and window.first_step + len(window.slots) - 1 > step:
                self._free_slots.append(window.slots.pop())
                if not window.slots:
                    self._windows[block] = None

    def _submit(
        self,
        block: int,
        *,
        due_step: int,
        prediction_steps: float = 0.0,
        cause: Cause = "publish_wait",
        early: bool = False,
    ) -> None:
        """Submits a block's open window; one without any is published again, if its weights are not the exact ones."""
        window = self._windows[block]
        if window is None:
            if self._publishing.exact:
                return
            window = Window(first_step=due_step)
        while not self._free_buffers:
            # More jobs at once than the staggered schedule ever has (synchronous step, flush): they go through in turn.
            self._publish_oldest(due_step, cause)
        buffer = self._free_buffers.pop()
        if buffer in self._published_now and self._device.type == "cuda":
            with self._stalls.measure("publish_buffer"):
                torch.cuda.current_stream(self._device).synchronize()
            self._published_now.clear()
        self._windows[block] = None
        job = UpdateJob(
            job_id=self._next_job_id,
            block=block,
            last_step=window.first_step + len(window.slots) - 1,
            due_step=due_step,
            slots=window.slots,
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
                rule=self._publishing.rule,
                prediction_steps=prediction_steps,
                n_updates=self._n_updates[block],
                early=early,
            )
        )
        self._n_updates[block] += bool(window.slots)
        self._in_flight.append(job)

    def _publish_oldest(self, step: int, cause: Cause) -> None:
        """Waits for the oldest round, copies its weights into the model and frees what it held."""
        job = self._in_flight.popleft()
        completion = job.completion
        if completion is None:
            with self._stalls.measure(cause):
                completion = self._worker.wait()
        self._stalls.add_job(job.block, completion)
        assert completion.job_id == job.job_id, "the worker answers in order of submission"
        if job.early:
            # From here on its buffer may be reused in this stream's order.
            self._published_weights.wait()
        rest = self._published_weights.copy_rest(job.block, job.publish_buffer, but=job.early, after=job.filled)
        self._traffic.h2d_bytes += rest
        n = len(job.slots)
        self.counts.gradients += n
        self.counts.age_steps += n * (step - job.last_step) + n * (n - 1) // 2
        self._free_slots.extend(job.slots)
        self._free_buffers.append(job.publish_buffer)
        self._published_blocks[job.block] = self._exact_for[job.block] = job.last_step
        self._published_now.add(job.publish_buffer)
