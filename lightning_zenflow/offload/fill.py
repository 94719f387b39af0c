"""A step's gradients on their way to the slots: sums over micro-batches, on the device or in the slots; what has arrived; the submission of
complete blocks in backward, where the worker's update hides with d = 0; and phase *fill*, which does all of it.
"""

import logging
from collections.abc import Iterable, Set
from typing import Literal

import torch
from torch import Tensor

from lightning_zenflow.core.device import DeviceNumber, has_room
from lightning_zenflow.core.step_inputs import GradientNorms, StepScale, clip_factor, mean_beta1
from lightning_zenflow.offload.gradient_router import GradientRouter, VectorGradients
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.ownership import Ownership
from lightning_zenflow.offload.plan import StepContext
from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.rank_state import Block, RankState

_log = logging.getLogger(__name__)


class Accumulation:
    """Owner of the gradients of micro-batches that are not their step's last.

    Sums are in device memory, as much as the rank's part of the gradients; or in the slots that the step's gradients go to in the end. Then
    the device needs memory for the largest slice only, and each sum crosses PCIe both ways, in stream order; the host does not wait. Sums
    are rounded to the model's type after each micro-batch: the same bits wherever they are.

    Args:
        jobs: with sums on the host, a block acquires its slot at the first micro-batch, before phase *open*.
        where: `ZenFlowConfig.accumulate_on`. "auto" is decided at the first micro-batch, when the device's memory has been as full as it
            gets.
    """

    def __init__(self, rank: RankState, jobs: JobQueue, *, where: Literal["auto", "device", "host"]) -> None:
        self._rank = rank
        self._jobs = jobs
        self._where = where
        self._on_device: Tensor | None = None  # [partition.numel], model dtype
        self._pending: set[int] = set()

    @property
    def pending(self) -> list[int]:
        """Slices with a sum that has not been taken, ascending."""
        return sorted(self._pending)

    def add(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Adds a gradient of a micro-batch that is not the step's last.

        Args:
            slice_index: index into `Partition.slices`.
            gradient: [slice.numel], model dtype, on the device; may be changed in place.
            step: number of the step.
        """
        if self._where == "auto":
            room = has_room(self._rank.partition.numel * self._rank.dtype.itemsize, self._rank.device)
            self._where = "device" if room else "host"
            _log.info("ZenFlow: accumulate_on='auto': gradients are accumulated on the %s", self._where)
        if self._where == "host":
            if slice_index in self._pending:
                gradient.add_(self._sum(slice_index))
            else:
                self._jobs.acquire(self._rank.blocks.of_slice[slice_index], step)
            for begin, slot in self._jobs.slots.views_of_slice(slice_index):
                slot.copy_(gradient.narrow(0, begin, slot.numel()), non_blocking=True)
                self._rank.telemetry.d2h_bytes += slot.nbytes
        elif slice_index in self._pending:
            self._sum(slice_index).add_(gradient)
        else:
            self._sum(slice_index).copy_(gradient)
        self._pending.add(slice_index)

    def peek(self, slice_index: int) -> Tensor | None:
        """A pending sum, which stays pending: [slice.numel], model dtype, on the device; None if there is none."""
        return self._sum(slice_index) if slice_index in self._pending else None

    def take(self, slice_index: int) -> Tensor | None:
        """As `peek`; the sum is no longer pending."""
        total = self.peek(slice_index)
        self._pending.discard(slice_index)
        return total

    def clear(self) -> None:
        """Drops all sums that have not been taken."""
        self._pending.clear()

    def release(self) -> Tensor | None:
        """Frees the device memory of the sums where none is pending; where some are, returns it."""
        if not self._pending:
            self._on_device = None
        return self._on_device

    def _sum(self, slice_index: int) -> Tensor:
        s = self._rank.partition.slices[slice_index]
        if self._where == "device":
            if self._on_device is None:
                self._on_device = torch.empty(
                    self._rank.partition.numel, dtype=self._rank.dtype, device=self._rank.device
                )
            return self._on_device.narrow(0, s.begin, s.numel)
        total = torch.empty(s.numel, dtype=self._rank.dtype, device=self._rank.device)
        for begin, slot in self._jobs.slots.views_of_slice(slice_index):
            total.narrow(0, begin, slot.numel()).copy_(slot, non_blocking=True)
            self._rank.telemetry.h2d_bytes += slot.nbytes
        return total


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
            blocks: those whose last slice has arrived.
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


class Fill:
    """Phase *fill* of `JobQueue`: the gradients of a step, from their reduction to the slots, and all that is done when one arrives.

    Args:
        accumulate_on: `ZenFlowConfig.accumulate_on`.
        speculates: see `BackwardSubmission`.

    Attributes:
        accumulation: sums over earlier micro-batches.
        trained: slices whose gradients are expected.
        norms: squared norms of it.
        in_backward: submission of complete blocks.
    """

    def __init__(
        self,
        rank: RankState,
        jobs: JobQueue,
        ownership: Ownership,
        provisional: ProvisionalUpdate,
        *,
        accumulate_on: Literal["auto", "device", "host"],
        speculates: bool,
    ) -> None:
        self._rank = rank
        self._jobs = jobs
        self._provisional = provisional
        self.accumulation = Accumulation(rank, jobs, where=accumulate_on)
        self._router = GradientRouter(rank, jobs.slots, ownership, provisional)
        self._vectors = VectorGradients(rank, jobs.slots, ownership)
        self.trained: Set[int] = frozenset(range(len(rank.partition.slices)))
        self._arrived: dict[int, None] = {}
        self._new: set[int] = set()  # those of them that `JobsInFlight.poll` does not know yet
        self.norms = GradientNorms(len(rank.blocks), rank.device)
        self.in_backward = BackwardSubmission(rank, jobs, self.norms, self._vectors, speculates=speculates)

    @property
    def arrived(self) -> Set[int]:
        """Slices whose gradient of the whole step has been routed, in that order."""
        return self._arrived.keys()

    def accumulate(self, slice_index: int, gradient: Tensor, step: int) -> None:
        """Takes a gradient of a micro-batch that is not its step's last; as `Accumulation.add`."""
        if slice_index in self.trained:
            self.accumulation.add(slice_index, gradient, step)

    def open(self, context: StepContext) -> None:
        """Begins a step; before the first gradient of its last micro-batch."""
        self._jobs.open(context.number)
        self._arrived.clear()
        self._new.clear()
        for block in self._rank.blocks:
            block.missing = block.slices & self.trained
        self.norms.open(context.inputs.loss_scale)
        self.in_backward.open()
        self._provisional.open(context.inputs.loss_scale)

    def receive(self, context: StepContext, slice_index: int, gradient: Tensor) -> None:
        """Takes a gradient of the last micro-batch: [slice.numel], model dtype, on the device; may be changed in place."""
        # A parameter that was unfrozen between two micro-batches is trained from the next step on.
        if slice_index in self.trained:
            earlier = self.accumulation.take(slice_index)
            complete = self._route(context, slice_index, gradient if earlier is None else gradient.add_(earlier))
            if complete and context.plan.submits_in_backward:
                self.in_backward.submit(complete, self.arrived, context)

    def finish(self, context: StepContext) -> Tensor:
        """Routes the gradients of parameters that the last micro-batch did not use, after backward.

        Returns:
            Squared norm of this rank's gradients: 0-D float64 on the device, not finite if any element is not.
        """
        for index in self.accumulation.pending:
            total = self.accumulation.take(index)
            assert total is not None
            self._route(context, index, total)
            # The next step writes to the sum's memory.
            self._rank.d2h.join()
        for index in sorted(self.trained - self.arrived):
            if index not in self._vectors:
                self._jobs.acquire(self._rank.blocks.of_slice[index], context.number)
                self._router.route_zeros(index)
                self._slice_complete(index)
        self._poll(context.number)
        self._jobs.acquire(self._rank.blocks, context.number)
        rest = [block for block in self._rank.blocks if block not in self._jobs.submitted_in_backward]
        self.norms.add(self._vectors.fill(rest, self.arrived))
        return self.norms.whole()

    def gradient(self, slice_index: int) -> Tensor:
        """Gradient of a slice in the step that is next, where `ZenFlowStep.has_gradients`; to be read before it. Waits for the device.

        Returns:
            [slice.numel], model dtype, on the device or the host.
        """
        pending = self.accumulation.peek(slice_index)
        if pending is not None:
            return pending
        is_routed = slice_index in self._arrived
        if is_routed and slice_index in self._vectors:
            return self._vectors.gradient(slice_index)
        return self._router.gradient(slice_index, is_routed=is_routed)

    def unused(self) -> list[int]:
        """Trained slices without a gradient in the step that is next, ascending."""
        return sorted(self.trained - self.arrived - set(self.accumulation.pending))

    def _route(self, context: StepContext, slice_index: int, gradient: Tensor) -> list[Block]:
        """Routes one slice's gradient of the whole step; returns the blocks that are complete with it."""
        if slice_index in self._vectors:
            self._vectors.keep(slice_index, gradient)
            return self._slice_complete(slice_index)
        self._jobs.acquire(self._rank.blocks.of_slice[slice_index], context.number)
        squared_norms, late = self._router.route(context, slice_index, gradient)
        self.norms.add(squared_norms)
        if late is not None:
            hyperparameters = context.inputs.groups[self._rank.partition.slices[slice_index].param_group]
            self._provisional.apply_gradient(context.number, late, hyperparameters, context.schedule)
        complete = self._slice_complete(slice_index)
        self._poll(context.number)
        return complete

    def _slice_complete(self, index: int) -> list[Block]:
        """Notes that a slice's gradient of the whole step has been routed; returns the blocks that are complete with it, ascending."""
        self._arrived[index] = None
        self._new.add(index)
        blocks = self._rank.blocks.of_slice[index]
        for block in blocks:
            block.missing.discard(index)
        return [block for block in blocks if not block.missing]

    def _poll(self, step: int) -> None:
        new, self._new = self._new, set()
        self._jobs.in_flight.poll(step, new)
