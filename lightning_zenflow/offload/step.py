"""One optimizer step, without DeepSpeed: its phases, and the state that they share."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.profiler import record_function

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.core.step_inputs import StepScale, add_over_ranks, step_scale
from lightning_zenflow.offload.rank_state import StepContext, StepInputs, Transaction
from lightning_zenflow.offload.run_state import VERSION, StepParts, Trained, difference_of, layout_of
from lightning_zenflow.worker.process import WorkerError


class StepState(Enum):
    """State of the step that is next, and what `ZenFlowStep` has of it."""

    IDLE = auto()
    """The last micro-batch's backward pass has not begun: there is no context and no norm."""
    OPEN = auto()
    """It has begun, or is over: the step's `StepContext` is fixed. No more gradients are received once there is a squared norm."""
    UNDER_WAY = auto()
    """A change between these, or the phases behind *reduce*. If a later call finds this state, an exception has interrupted them."""


class ZenFlowStep:
    """Runs the optimizer steps of one rank. In backward `receive` is phase *fill*; `step` then runs the phases from *reduce* to *gather*
    (docs/how_it_works.md), which `torch.profiler` shows as "zenflow update" and so on.

    `parameters` are those of `Trained`. `read_inputs` gives the present inputs and never waits for a device; `gather_weights` exchanges the
    ranks' updated weights.

    Attributes:
        number: steps so far.
        micro_batches: backward passes since the last step.
        count: 0-D float64 on the device: number of applied steps.
        layout: what must be the same for a run to continue this one bit for bit.
        has_single_backward: in manual optimization, whether the last closure of a step had one backward pass, so that the first one of the
            next closure is taken for its last.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        parts: StepParts,
        parameters: Mapping[str, Tensor],
        *,
        read_inputs: Callable[[], StepInputs],
        gather_weights: Callable[[], None],
    ) -> None:
        self.layout = layout_of(config, parts.rank.partition, world_size=parts.rank.n_ranks)
        self._parts = parts
        self._trained = Trained(
            parameters=parameters, flags=[True] * len(parameters), since=0, counts=[0] * len(parameters)
        )
        self._read_inputs = read_inputs
        self._gather_weights = gather_weights
        self._rank, self._telemetry = parts.rank, parts.rank.telemetry
        self._jobs, self._fill, self._moves = parts.jobs, parts.fill, parts.moves
        self._ownership, self._residents = parts.ownership, parts.residents
        self._planner, self._selector, self._provisional = parts.planner, parts.selector, parts.provisional
        self.count = torch.zeros((), dtype=torch.float64, device=parts.rank.device)
        self._state = StepState.IDLE
        self._context: StepContext | None = None  # from OPEN on
        self._squared_norm: Tensor | None = None  # from phase *reduce* on
        self.micro_batches = 0
        self.number = self._flushed_number = self._silent_until = 0
        self._flushing, self._refreezing = Transaction(), Transaction()
        self.has_single_backward = False
        self.start_over(count=0)

    @property
    def is_flushed(self) -> bool:
        """Whether each owner's state, and what the model shows, is exact after all steps so far."""
        is_flushed = self._flushed_number == self.number and not self._jobs.submitted_in_backward
        return is_flushed and not self.was_interrupted

    @property
    def is_exact(self) -> bool:
        """Whether the arena is the exact state of all steps so far."""
        return self.is_flushed and self._residents.in_arena

    @property
    def is_complete(self) -> bool:
        """Whether only `step` is missing: the last micro-batch's backward pass has begun."""
        return self._state is not StepState.IDLE

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception has interrupted `step`, `gradient_norm` or a flush, or a change of the records; a flush comes next."""
        return self._state == StepState.UNDER_WAY or self._flushing.is_broken or self._rank.records.is_broken

    def begin_backward(self, *, last: bool) -> None:
        """Counts a backward pass, before its first gradient; `last`: of the step's last micro-batch."""
        self._refuse_interrupted()
        self.micro_batches += 1
        if self._moves.watches or self._residents.blocks:
            self._moves.before_backward(self.number, self.count, can_give_back=self.can_give_back)
        if last:
            self._opened()

    def complete(self) -> None:
        """Ends the backward passes of a step, of which there was one: the one before was the last."""
        self._opened()

    def receive(self, slice_index: int, gradient: Tensor, *, last: bool) -> None:
        """Takes one slice's reduced gradient of a micro-batch, the step's last one or not; called in backward, in stream order behind its
        reduction. `gradient`: [slice.numel], model dtype, on the device; may be changed in place, and is not read after the work that this
        call enqueues.
        """
        if last:
            self._fill.receive(self._opened(), slice_index, gradient)
        else:
            self._fill.accumulation.add(slice_index, gradient, self.number + 1)

    @property
    def has_gradients(self) -> bool:
        """Whether the last micro-batch of a step is over, or under way, and the step is not."""
        return self._state is StepState.OPEN and not self.was_interrupted

    @property
    def trained(self) -> list[bool]:
        """For each parameter whether the step that is next updates it."""
        return self._trained.flags

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Phase *reduce*: `StepScale.norm` of the step, which receives no more gradients. All ranks call it together."""
        context = self._opened()
        squared_norm, loss_scale = self._reduce(context), context.inputs.loss_scale
        return step_scale(squared_norm, max_norm=0, loss_scale=loss_scale, count=self.count).norm

    @torch.no_grad()
    def step(self, *, copies_finite: bool = False) -> tuple[StepScale, AsyncHostCopy | None]:
        """One optimizer step. Returns its scale; and with `copies_finite` the copy of `StepScale.finite`, which has begun before the rest
        of the step was enqueued.
        """
        context = self._opened()
        number = context.number
        # reduce
        with record_function("zenflow reduce"):
            squared_norm = self._reduce(context)
        self._state = StepState.UNDER_WAY
        # Read again: a hook may have changed them after backward.
        inputs, loss_scale = self._read_inputs(), context.inputs.loss_scale
        groups = inputs.groups
        self._rank.arena.write_hyperparameters(number, list(groups))

        # clip
        scale = step_scale(squared_norm, max_norm=inputs.max_norm, loss_scale=loss_scale, count=self.count)
        if inputs.factor is not None:
            scale = replace(scale, factor=scale.factor * inputs.factor.whole)
        unscaling = None if inputs.factor is None else inputs.factor.unscaling
        self._fill.end_step(squared_norm, scale, context, unscaling)
        finite = AsyncHostCopy(scale.finite) if copies_finite else None
        # seal
        self._jobs.seal(number, scale.factor)
        with self._rank.records:
            # From here on a flush applies the step; after an exception before, it drops it.
            self.number, self.count = number, scale.count
            if self._residents.blocks:
                self._residents.seal(number, groups, scale)
            self._telemetry.skipped.add_(~scale.finite)
        # update
        with record_function("zenflow update"):
            if self._ownership.current is not None:
                self._ownership.current.step(number, groups, scale)
            if self._residents.blocks:
                self._residents.step()
        if self._provisional is not None:
            self._provisional.end_step(scale, loss_scale)
        # select
        with record_function("zenflow select"):
            selected = self._select(context, scale.finite)
        # submit
        with record_function("zenflow submit"):
            self._jobs.submit_closing(context, groups)
        # publish
        with record_function("zenflow publish"):
            published = self._jobs.publish(number)
            if self._provisional is not None:
                self._provisional.published(published, context.schedule)
            if selected is not None:
                self._ownership.take(selected, "select")
            elif context.releases:
                self._ownership.clear()
            if self._ownership.current is not None:
                self._ownership.current.write_weights()
        # gather
        with record_function("zenflow gather"):
            self._gather_weights()

        self._telemetry.counts.steps += 1
        share = None if self._planner.control is None else self._planner.end_step(context)
        if not copies_finite:
            self._telemetry.warn_of_skipped(number)
        self._end_micro_batches()
        if self._moves.watches:
            self._moves.memory.end()
        if share is not None:
            self._flush()
            self._moves.take_share(share, self.number)
        return scale, finite

    def follow_freezing(self) -> None:
        """Follows changes of `requires_grad`; between steps, alike on all ranks."""
        flags = [p.requires_grad for p in self._trained.parameters.values()]
        if flags == self._trained.flags and not self._refreezing.is_broken:
            return
        self.flush()
        self._change_trained(flags, None)
        # Who does so in every batch reads it once.
        if self.number >= self._silent_until:
            rank_zero_info(
                f"ZenFlow: parameters were frozen or unfrozen before step {self.number + 1}: the selection of columns starts again"
            )
        self._silent_until = self.number + 16

    def flush(self, *, lays_down: bool = True) -> None:
        """Makes weights and arena the exact state of all steps that were sealed; drops the gradients of a step that is complete or
        interrupted. Without `lays_down` the state of resident blocks may stay on the device, if nobody reads the arena. WorkerError: an
        exception has cut a change of `RankState.records`, or the worker failed: the exact state is lost.
        """
        if self.is_complete:
            self.drop_gradients()
        elif not self.is_flushed:
            self._flush()
        if lays_down:
            with torch.no_grad():
                self._residents.lay_down()

    @property
    def can_give_back(self) -> bool:
        """Whether blocks are resident, and no gradient is on its way to them."""
        is_free = not (self.is_complete or self.was_interrupted or self._fill.accumulation.pending)
        return bool(self._residents.blocks) and is_free

    def drop_gradients(self) -> None:
        """Drops the gradients since the last step; if the step was complete, by a flush."""
        if self.is_complete:
            self._flush()
        if self._state == StepState.UNDER_WAY:
            # Selection and schedule may have been changed in part.
            self._planner.apply_schedule()
            self.start_over(int(self.count))
        self._end_micro_batches()

    def _end_micro_batches(self) -> None:
        self._fill.close()
        self._context = self._squared_norm = None
        self.micro_batches, self._state = 0, StepState.IDLE

    def _flush(self) -> None:
        if self._rank.records.is_broken:
            raise WorkerError(
                "an exception interrupted training between two records of what the worker has been given: the exact optimizer state is"
                " lost; continue from the last checkpoint"
            )
        with torch.no_grad(), self._flushing:
            self._jobs.flush(self.number)
            self._residents.step()
            if self._provisional is not None:
                self._provisional.flushed()
            self._ownership.reload()
            self._gather_weights()
            # Not the arena's count: on a rank that holds only padding, no job ever counts steps there.
            self._parts.host_state.write_count(int(self.count))
            if self._planner.control is not None:
                self._planner.control.interrupt()
            self._flushed_number = self.number
        self._flushing.repaired()

    def start_over(self, count: int, *, shows_exact: bool = False) -> None:
        """Makes nothing device-owned until the next selection, after `count` applied steps; right after a flush only. See `Planner`."""
        self._planner.start_over(self.number, count, shows_exact=shows_exact)
        self._ownership.clear()

    def state_dict(self) -> dict[str, Any]:
        """State besides AdamW's that continues the run bit for bit; right after a flush only."""
        return {
            "version": VERSION,
            "layout": self.layout,
            "step": self.number,
            "skipped": int(self._telemetry.skipped),
            "trained": self._trained.flags,
            "counts": self._trained.counts_at(int(self.count)),
            "single_backward": self.has_single_backward,
            **self._parts.state_dict(),
        }

    def load_state_dict(
        self, saved: Mapping[str, Any] | None, count: int, counts: Mapping[str, int] | None, *, continues: bool = True
    ) -> str:
        """Continues a run after `count` applied steps, where AdamW's state has been loaded into the arena. `saved` is a `state_dict`, or
        None; `counts` as of `Trained.changed`; `continues` is false where a rank cannot do so bit for bit. Returns the reason; empty if
        the run does.
        """
        self.count = torch.full_like(self.count, count)
        flags, difference = self._trained.flags, "it is not one of ZenFlow"
        if saved is not None:
            difference = difference_of(saved, self.layout, len(self._rank.blocks))
            difference = difference or ("" if continues else "its partition is another")
            self.number = self._flushed_number = saved["step"]
            self._telemetry.skipped.fill_(saved["skipped"])
            # Columns are restored for the parameters that were trained at the save; `follow_freezing` compares `requires_grad` with them.
            flags = flags if difference else saved["trained"]
        self._rank.arena.continue_from(self.number, count)
        self._residents.load(self.number)
        self._change_trained(flags, counts)
        self.start_over(count)
        if saved is not None and not difference:
            self._parts.load_state_dict(saved)
            # Earlier checkpoints do not say.
            self._moves.load_state_dict(saved.get("residents", {}), self.number)
            # Earlier checkpoints have it among the planner's, or do not say.
            self.has_single_backward = saved.get("single_backward", saved["planner"].get("single_backward", False))
        return difference

    def _change_trained(self, flags: list[bool], counts: Mapping[str, int] | None) -> None:
        """Updates other parameters, or with other counts; right after a flush. `follow_freezing` repeats it if it is interrupted."""
        trained = self._trained.changed(flags, counts, int(self.count))
        n_missed = trained.n_missed
        is_other = n_missed != self._trained.n_missed or self._refreezing.is_broken
        with self._refreezing:
            if is_other:
                of_slices = enumerate(n_missed[s.parameter] for s in self._rank.partition.slices)
                self._rank.trained.clear()
                self._rank.trained.update((index, n) for index, n in of_slices if n is not None)
                self._jobs.follow_trained()
                self._residents.follow_trained()
                # Those who freeze in turns do so in each step, behind the forward pass perhaps, whose weights the flush must not change.
                self.start_over(trained.since, shows_exact=True)
            self._trained = trained
        self._refreezing.repaired()

    def _reduce(self, context: StepContext) -> Tensor:
        """Once a step; returns the squared norm of all ranks' gradients: 0-D float64 on the device."""
        if self._squared_norm is None:
            self._state = StepState.UNDER_WAY
            squared_norm = self._fill.finish(context)
            add_over_ranks(squared_norm, self._rank.group)
            self._squared_norm, self._state = squared_norm, StepState.OPEN
        return self._squared_norm

    def _refuse_interrupted(self) -> None:
        if self.was_interrupted:
            raise RuntimeError(
                "an exception has interrupted an optimizer step: flush first, which makes the state exact again or says it is lost"
            )

    def _opened(self) -> StepContext:
        """Inputs of the step that is next; the first call begins it."""
        self._refuse_interrupted()
        if not self.is_complete:
            inputs = self._read_inputs()
            self._state = StepState.UNDER_WAY
            if self._moves.is_written:
                self._moves.take_written(self.number)
            self._context = self._planner.plan(self.number + 1, inputs)
            self._fill.open(self._context)
            self._state = StepState.OPEN
        assert self._context is not None
        return self._context

    def _select(self, context: StepContext, finite: Tensor) -> list[Tensor | None] | None:
        """Selects columns where that is due; returns those of each slice, None for all."""
        if context.releases:
            self._selector.start_over()
        if (norms := context.column_norms) is None:
            return None
        add_over_ranks(norms.flat, self._rank.group)
        # The host waits; counted as stall.
        with self._telemetry.measure("select"):
            columns = self._selector.select(norms, context.number, finite=finite)
        return None if columns is None else [columns[s.parameter] for s in self._rank.partition.slices]
