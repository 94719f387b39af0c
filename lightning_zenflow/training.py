"""One model's training on one rank: what every front calls, without DeepSpeed and without Lightning."""

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_zenflow.between_steps.full_state import FullState
from lightning_zenflow.between_steps.uses import FOLLOWED, ServedGradients, WeightsInUpdate, WrittenWeights
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.errors import Calls, MisconfigurationException, other_backward
from lightning_zenflow.offload.build import Engine, RankPart, RankResources, build
from lightning_zenflow.offload.rank_state import StepInputs
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from lightning_zenflow.offload.step import ZenFlowStep
from lightning_zenflow.worker.process import SupervisedWorker, WorkerError

_log = logging.getLogger(__name__)

_Output = TypeVar("_Output")


class Training:
    """One model's training on one rank, held by the engine's optimizer and by the front. `frozen` are parameters of the user's optimizer
    that were frozen at setup and cannot be trained.

    Attributes:
        order: names of the parameters of each group of the user's optimizer, frozen ones as well; of trained ones unless it is given.
        max_norm: largest norm of the whole gradient after clipping; also of a step that is complete already. 0: no clipping. Infinity: that
            of the user's code, which may clip.
        in_backward: whether a backward pass of the front is under way.
        parts, telemetry, steps, host_state, full_state, written, gradients, in_update: components of this rank, from `start` on.
        slice_of: for each trained parameter of which this rank has a part, the number of its slice; from `start` on.
        shapes_by_group: for each parameter group of the user's optimizer the shapes of its whole trained parameters, by name.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        resources: RankResources,
        calls: Calls,
        frozen: Mapping[str, Tensor],
        order: Sequence[Sequence[str]] = (),
    ) -> None:
        self.config, self.calls, self.order = config, calls, order
        self.max_norm = 0.0
        self._has_scaled = False  # the user's code, the gradients of some step before
        self._resources, self._frozen = resources, frozen
        self._updates_in_backward = config.submits_in_backward or not config.is_immediate
        self._worker: SupervisedWorker | None = None
        self.in_backward = False
        self._process, self._thread = os.getpid(), threading.get_ident()

    def start(self, part: RankPart, engine: Engine) -> None:
        """Makes the arena, which takes the place of the engine's memory, and starts the worker; all ranks call it together."""
        self.parts = parts = build(self.config, part, self._resources)
        self.host_state, self._worker, self.telemetry = parts.host_state, parts.rank.worker, parts.rank.telemetry
        self._engine, self._optimizer = engine, part.optimizer
        self.shapes_by_group = [{name: part.shapes[name] for name in group} for group in part.groups]
        self.order = self.order or list(map(list, part.groups))
        in_order = list(part.parameters.values())
        self.slice_of = {in_order[s.parameter]: number for number, s in enumerate(parts.rank.partition.slices)}
        self.steps = ZenFlowStep(
            self.config,
            parts,
            part.parameters,
            read_inputs=self._read_inputs,
            gather_weights=self._gather_weights,
        )
        self.full_state = FullState(self.steps, parts, self.host_state.states, part, flush=self.flush)
        self.gradients = ServedGradients(self.full_state, engine, self.config, self.calls)
        self.written = WrittenWeights(self.steps, parts, part, self.calls)
        self.in_update = WeightsInUpdate(parts.rank.weights, part, self.calls)
        # The engine's start needs up to 6 bytes a parameter more than a step, which `HostRuntime.room` would count for ever.
        runtime_of(parts.rank.device).forget_peak()

    def before_forward(self) -> None:
        """Before a forward pass in training: makes the state exact after an interrupted step, and takes over what the user's code has done
        to gradients, weights and, before the first backward pass of a step, `requires_grad`; or refuses what it has done.
        """
        self._follow_dropped()
        self._engine.refuse_use()
        # What is written between two backward passes of a step is for the next of them, and may be put back before `complete`.
        if self.steps.micro_batches == 0 and self.written.look():
            self.flush(lays_down=False)
        if self.steps.was_interrupted and not self.closed:
            self.flush()  # on this rank alone, perhaps: then a later collective of the ranks times out
        if self.steps.micro_batches == 0:
            for name, parameter in self._frozen.items():
                if parameter.requires_grad:
                    raise MisconfigurationException(
                        f"{name}.requires_grad must be False, got True: only parameters that required gradients at setup are trained;"
                        " set it up trainable and freeze it after that, before the first step"
                    )
            self.steps.follow_freezing()

    def before_backward(self, *, last: bool) -> None:
        """As `before_forward`, before a backward pass, of the step's last micro-batch or not; refuses gradients of other passes."""
        self.before_forward()
        if self.steps.micro_batches == 0 and self.gradients.are_there:
            # torch would add to them.
            raise MisconfigurationException(
                f"`optimizer.zero_grad()` must come before the first backward pass of each step: {self.calls.front} does not keep"
                f" gradients of a step that is done; to accumulate them before it, {self.calls.accumulate}"
            )
        self.in_update.end()
        self.gradients.begin_pass()
        self._engine.refuse_other_backward()
        if last:
            self.complete()
        self.in_backward = True
        self.steps.begin_backward(last=last)

    def receive(self, slice_index: int, gradient: Tensor, *, last: bool) -> None:
        """`ZenFlowStep.receive`."""
        if not self.in_backward:
            raise other_backward(self.calls)
        self.steps.receive(slice_index, gradient, last=last)
        if last and self._updates_in_backward:
            self.written.note_arrival(self.parts.rank.partition.slices[slice_index].parameter)

    def end_backward(self) -> None:
        """Behind a backward pass, when all gradients are taken: shows them, and refuses uses of weights where updates are under way."""
        self.in_backward = False
        self.gradients.mark(self.steps.trained)
        if not self.steps.is_complete:
            self.written.note_pass()
        self._guard()

    def complete(self) -> None:
        """`ZenFlowStep.complete`: updates begin. What is still written then is taken over before."""
        if self.steps.micro_batches and not self.steps.is_complete:
            if self.written.look():
                self.flush(lays_down=False)
            self.steps.complete()

    def gradient_norm(self) -> Tensor:
        """`ZenFlowStep.gradient_norm`, behind the step's last backward pass."""
        self.in_update.end()
        self.complete()
        norm = self.steps.gradient_norm()
        self._guard()
        return norm

    def step(self, *, asks_finite: bool) -> tuple[Tensor, bool | None] | None:
        """One optimizer step; None: there was no gradient since the last one. Returns the norm of the whole gradient before clipping, 0-D
        float32 on the device, and whether weights have changed: with `asks_finite`, for which the host waits for the device, else None.
        """
        self._follow_dropped()
        if self.steps.micro_batches == 0:
            # As torch's, which skips parameters without a gradient.
            if self.gradients.are_there:
                raise MisconfigurationException(
                    f"{self.calls.front}: a step must have a backward pass of its own, got a second call of `optimizer.step` behind one"
                )
            self._engine.refuse_other_backward()
            return None
        if (is_scaled := self.gradients.factor() is not None) and 0 < self.max_norm < math.inf:
            raise MisconfigurationException(
                f"{self.calls.front}: a step's gradients must be clipped once, got {self.calls.clip} or `gradient_clipping` for gradients"
                " that have been scaled in `parameter.grad`: leave out one of them"
            )
        if self.steps.is_complete:
            self.written.refuse()
        self.complete()
        self._engine.refuse_unused()
        scale, copy = self.steps.step(copies_finite=asks_finite)
        self._has_scaled |= is_scaled
        self.gradients.forget()
        finite = None
        if copy is not None:
            with self.telemetry.measure("loss_scale"):
                finite = bool(copy.read())
        if self.written.follows_step:
            self.telemetry.counts.followed_steps += 1
            if self.telemetry.counts.followed_steps == FOLLOWED + 1:
                rank_zero_info("ZenFlow: weights are written in place time and again: each step waits for its updates")
            self.flush(lays_down=False)
        self.written.note(behind_step=True)
        return scale.norm, finite

    def drop_gradients(self) -> None:
        """Drops the gradients since the last step."""
        self.in_backward = False
        self.allow_all()
        self.steps.drop_gradients()

    def allow_all(self) -> None:
        """Removes what stands in for gradients, and allows all uses of weights, until the next backward pass."""
        self.in_update.end()
        self.gradients.clear()

    def flush(self, *, lays_down: bool = True) -> None:
        """Makes arena and weights the exact state of all steps so far; drops the gradients of a step that is complete. Without `lays_down`
        the arena may lack what the device owns: for who only reads weights. WorkerError if the exact state is lost: the worker has ended,
        or an interrupted step has been submitted to it.
        """
        if self.is_elsewhere:
            raise RuntimeError(
                "a process that was forked from the one that trains has no state of the optimizer: save checkpoints and flush before the"
                " fork, or in the process that trains"
            )
        if self.closed and not self.steps.is_exact:
            raise WorkerError(
                f"training ended before the worker had applied all of its {self.steps.number} steps:"
                " the exact optimizer state is lost"
            )
        self._engine.join_reads()
        self.in_update.end()
        # A flush leaves writes to exact weights as they are: the next forward pass looks for them.
        if changes := not self.steps.is_flushed:
            self.written.look()
            self.written.begin_updates()
        try:
            self.steps.flush(lays_down=False)
        except WorkerError:
            # The caller may end with another error, and nothing else would end the worker.
            self.end(keep_state=False)
            raise
        if has_written := self.written.take_over():
            self._engine.gather_weights()
            self.parts.moves.is_written = True
        if changes or has_written:
            self.written.note()
        if lays_down:
            self.steps.flush()

    def give_back(self) -> None:
        """Frees the device memory of optimizer states (`offload_ratio`): the host owns all of them from here on. Between two steps; all
        ranks call it together.
        """
        if self.closed or not self.parts.residents.n_bytes:
            return
        if not self.steps.can_give_back:
            raise MisconfigurationException(
                "give_back must be called between two steps, got a call between a backward pass and its step"
            )
        self.parts.moves.give_back(0, self.steps.count)

    def run_forward(self, forward: Callable[[], _Output]) -> _Output:
        """Calls `forward`. If the device runs out of memory beside blocks that can be given back, they are, for good, and one rank alone
        calls `forward` once more, with the same random numbers; on several a collective may be over on some, and the error goes on.
        """
        if self.closed or not self.steps.can_give_back:
            return forward()
        device, n_bytes = self.parts.rank.device, self.parts.residents.n_bytes
        state, states_there = torch.get_rng_state(), get_device_states(torch.empty(0, dtype=torch.uint8, device=device))
        try:
            return forward()
        except torch.OutOfMemoryError as error:
            lack = str(error)
        # Outside of `except`, whose traceback holds the activations.
        self.parts.moves.give_back(0, self.steps.count)
        _log.warning(
            "ZenFlow: a forward pass has run out of device memory beside %.2f GiB of optimizer states, which are in host memory from here"
            " on (offload_ratio=1 keeps them there): %s",
            *(n_bytes / 2**30, lack),
        )
        if self.parts.rank.group is not None:
            raise torch.OutOfMemoryError(lack)
        torch.set_rng_state(state)
        set_device_states(*states_there, device_type=device.type)
        return forward()

    def state_dict(self) -> dict[str, Any]:
        """State of the run besides AdamW's (`ZenFlowStep.state_dict`); right after a flush."""
        return self.steps.state_dict()

    def load(self, weights: Mapping[str, Tensor], saved: Mapping[str, Any] | None) -> None:
        """Continues from whole states, right after a flush and after the model has loaded its weights; all ranks call it together.

        Args:
            weights: master weights by name, [*shape of the parameter], any type; others stay.
            saved: "count" of applied steps, and "counts" of each parameter's own, the same where there is none; "groups" of options;
                "moments" by key and name, 0 where there is none; "zenflow", this rank's `state_dict` or None, and whether it "continues"
                bit for bit as far as the caller knows, true where it is missing. None: weights only.
        """
        for name, shape in self.full_state.shapes.items():
            if name in weights:
                self.full_state.write(name, weights[name])
            for key, of_names in sorted(({} if saved is None else saved["moments"]).items(), reverse=True):
                zero = torch.zeros((), dtype=torch.float32, device="cpu").expand(shape)
                self.full_state.write(name, of_names.get(name, zero), key)
        self.continue_from(saved)

    def continue_from(self, saved: Mapping[str, Any] | None) -> None:
        """Continues the run of a checkpoint, whose weights and moments are in the arena; see `load`."""
        count, counts = int(self.steps.count), None
        if saved is not None:
            count, counts = saved["count"], saved["counts"]
            for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
                # Copied: a tensor may be a view of a mapped file, and would keep it open.
                group.update(deepcopy({key: value for key, value in values.items() if key != "params"}))
        self.host_state.write_count(count)
        run_state = None if saved is None else saved.get(CHECKPOINT_KEY)
        continues = saved is None or saved.get("continues", True)
        difference = self.steps.load_state_dict(run_state, count, counts, continues=continues)
        # With true factors and nothing late there is nothing else that a run depends on.
        starts_again = self.config.predicts_clipping or not self.config.is_immediate
        if difference and saved is not None and starts_again:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: the schedule,"
                " the selection of columns and the second moments of provisional updates start again"
            )

    def end(self, *, keep_state: bool | None = None) -> None:
        """Ends the worker and releases the shared memory. May be called again. With `keep_state` master weights and moments stay readable
        for as long as the engine's tensors live; without, the worker is killed. None: they are kept if they are exact.
        """
        worker, rank = self._worker, self.parts.rank
        if keep_state is None:
            if worker is not None and rank.in_place:
                # After an exception too: the worker may be writing weights. Without an exact state they stay as they are.
                self.written.note()
                with suppress(RuntimeError):
                    self.flush()
            if worker is not None and self.steps.is_flushed:
                self.steps.flush()
            keep_state = self.steps.is_exact
        if self._worker is not None:
            if keep_state:
                self._worker.current.close()
            else:
                self._worker.current.kill()
            self._worker = None
        if not keep_state:
            self.host_state.clear()
        self.parts.residents.close()
        rank.arena.close(keep_state=keep_state, take_weights=self._engine.take_weights)
        if worker is not None:
            self._engine.has_ended()

    @property
    def closed(self) -> bool:
        """Whether the worker has been ended, or not been started."""
        return self._worker is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that trains, as behind `sys.exit` in a child that a hook has forked."""
        return os.getpid() != self._process

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next step belongs to, counted from 0; counts where `select_strategy` is "epoch"."""
        self.parts.selector.epoch = epoch

    def _read_inputs(self) -> StepInputs:
        self._engine.refuse_use()
        self.written.begin_updates()
        # Who has scaled gradients may do so again: backward passes do not rely on a factor of 1.
        max_norm = float(self.max_norm) or (math.inf if self._has_scaled else 0.0)
        groups, factor = self._engine.read_groups(), self.gradients.factor()
        return StepInputs(groups=groups, loss_scale=self._engine.loss_scale, max_norm=max_norm, factor=factor)

    def _gather_weights(self) -> None:
        self._engine.gather_weights()
        # The only parameter of a group may be the engine's flat buffer itself, and a gather then counts.
        self.written.note_gather()

    def _guard(self) -> None:
        # The mode is the thread's: on a device a backward pass may end in one of autograd's.
        is_here = threading.get_ident() == self._thread
        if self._updates_in_backward and self.steps.has_gradients and is_here:
            self.in_update.begin()

    def _follow_dropped(self) -> None:
        """Drops the gradients since the last step if the user's code has, by `module.zero_grad()`; Lightning does before a validation."""
        if self.gradients.are_dropped(pending=self.steps.micro_batches > 0):
            self.drop_gradients()
