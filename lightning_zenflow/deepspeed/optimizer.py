"""What DeepSpeed's optimizers around `ZenFlowStep` have in common, whatever the stage of ZeRO."""

import os
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from deepspeed.runtime.utils import is_optimized_parameter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import Stream, runtime_of
from lightning_zenflow.core.distributed import raise_together
from lightning_zenflow.core.errors import Calls, MisconfigurationException, other_backward
from lightning_zenflow.core.step_inputs import read_hyperparameters
from lightning_zenflow.deepspeed.between_steps import FOLLOWED, BetweenSteps
from lightning_zenflow.deepspeed.build import RankResources, ZeroPartition, build
from lightning_zenflow.deepspeed.flat_buffers import slices_of
from lightning_zenflow.deepspeed.host_state import Checkpointing
from lightning_zenflow.deepspeed.parameters import FullState, whole_shape
from lightning_zenflow.deepspeed.removal import in_pieces, restore_process
from lightning_zenflow.deepspeed.sleep import Sleep
from lightning_zenflow.offload.freezing import Freezing
from lightning_zenflow.offload.plan import StepInputs
from lightning_zenflow.offload.step import ZenFlowStep
from lightning_zenflow.worker.process import WorkerError
from lightning_zenflow.worker.supervisor import SupervisedWorker


class ZenFlowOptimizer(Sleep, Checkpointing):
    """Mixin of one of DeepSpeed's ZeRO offload optimizers, whose step then does not wait for the CPU (ZenFlow, arXiv 2505.12242).

    DeepSpeed keeps its part: flat model weights, gradient buckets and their reduction, checkpoint format, the engine around it. Its fp32
    partitions and AdamW's moments live in the arena that the worker shares, so DeepSpeed's own checkpoint code sees them as they are.
    Gradients and steps go to `ZenFlowStep`. The class of a stage says where the weights lie and routes the reduced gradients.

    Args:
        *args: as DeepSpeed's.
        zenflow: configuration.
        resources: cores and memory of the rank.
        **kwargs: as DeepSpeed's.

    Attributes:
        telemetry: stall clock and copied bytes.
        parts: components of this rank.
        full_state: weights and moments of single parameters.
        clip_grad: largest norm of the whole gradient after clipping, DeepSpeed's; also of a step that is complete already. 0: no clipping.
            Infinity: no clipping, which backward passes do not rely on.
        shapes_by_name: for each parameter group the shapes of its whole parameters that are trained, by name.
        zenflow_config: configuration of this training.
        zenflow_step: the step. Not `zenflow`, which is a flag of the base class.
        between_steps: what the user's code does between two steps.
    """

    namespace: ClassVar[ModuleType]
    """Module in which DeepSpeed's engine finds the class that a stage's class extends, the last of its bases."""
    # DeepSpeed's own, declared for the type checker.
    optimizer: Optimizer
    param_names: dict[Tensor, str]
    clip_grad: float
    dp_process_group: dist.ProcessGroup

    def __init__(
        self, *args: Any, zenflow: ZenFlowConfig, resources: RankResources, calls: Calls, **kwargs: Any
    ) -> None:
        # DeepSpeed's constructor calls `initialize_optimizer_states`, which needs these.
        self.zenflow_config = zenflow
        self._resources, self.calls = resources, calls
        self._updates_in_backward = zenflow.updates_in_backward
        self._worker: SupervisedWorker | None = None
        self._destroyed = self._in_backward = self._is_behind_step = False
        self._process = os.getpid()
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            if not self.closed:
                self.close(keep_state=False)
            raise
        # Lightning's `LearningRateMonitor` reads them, as from torch's.
        self.defaults = dict(self.optimizer.defaults)
        for name, added in self.full_state.parameters.items():
            # Private: with the first, `safe_get_full_grad` calls the second, whatever stands in `parameter.grad`.
            added._hp_grad, added.get_full_hp_grad = True, partial(self.full_state.gradient, name)

    def _build_step(self, **of_stage: Any) -> None:
        """Replaces DeepSpeed's host buffers by the arena and starts the worker.

        Args:
            **of_stage: what `ZeroPartition` has besides.
        """
        trained = [list(filter(is_optimized_parameter, of_group)) for of_group in self._of_groups]
        names = {p: self.param_names[p] for of_group in trained for p in of_group}
        shapes = {name: whole_shape(p) for p, name in names.items()}
        self.shapes_by_name = [{names[p]: shapes[names[p]] for p in of_group} for of_group in trained]
        parameters = list(names)
        zero = ZeroPartition(
            optimizer=self.optimizer,
            slices=slices_of(self.layouts, shapes, dist.get_rank(group=self.dp_process_group)),
            # Under stage 3 that on which parameters are gathered, and not that of a piece.
            device=parameters[0].device,
            shapes=list(shapes.values()),
            group=self.dp_process_group,
            **of_stage,
        )
        self.parts, self._host_state = build(self.zenflow_config, zero, self._resources)
        parts = self.parts
        self._worker, self._rank, self.telemetry = parts.rank.worker, parts.rank, parts.rank.telemetry
        self._slice_of = {parameters[s.parameter]: i for i, s in enumerate(self._rank.partition.slices)}
        self.zenflow_step = ZenFlowStep(
            self.zenflow_config,
            parts,
            Freezing(self._rank.partition, {name: p for p, name in names.items()}),
            self.dp_process_group,
            read_inputs=self._read_inputs,
            gather_weights=self._weights_change,
        )
        self.full_state = FullState(self, self._host_state.states, names, shapes)
        self.between_steps = BetweenSteps(
            self.zenflow_step,
            parts,
            names,
            self.dp_process_group,
            self.calls,
            updates_in_backward=self._updates_in_backward,
            flush=self.flush,
        )
        self._written = self.between_steps.written
        # DeepSpeed's start needs up to 6 bytes a parameter more than a step, which `HostRuntime.has_room` would count for ever.
        runtime_of(parts.rank.device).forget_peak()

    def _read_inputs(self) -> StepInputs:
        self.refuse_asleep()
        self._written.begin_updates()
        groups = read_hyperparameters(self.optimizer)
        return StepInputs(groups=groups, loss_scale=self.loss_scale, max_norm=float(self.clip_grad))

    def _weights_change(self) -> None:
        self._gather_weights()
        # The only parameter of a group may be DeepSpeed's flat buffer itself, and a gather then counts.
        self._written.note_gather()

    @abstractmethod
    def _gather_weights(self) -> None:
        """Exchanges the ranks' updated weights, where that is not done when they are used."""

    def _wait_for(self, stream: Stream | None) -> None:
        """Orders the training stream behind one of DeepSpeed's, if that is another one."""
        if stream is not None:
            runtime_of(self._rank.device).current_stream().wait_stream(stream)

    def begin_micro_batch(self) -> None:
        """Before a forward pass, and before a backward pass: follows what the user's code has done to gradients and weights."""
        self.between_steps.follow_dropped()
        self.refuse_asleep()
        self.between_steps.follow_writes()

    def begin_backward(self, *, last: bool) -> None:
        """`ZenFlowStep.begin_backward`, behind `begin_micro_batch`.

        Raises:
            MisconfigurationException: a backward pass of the user's own, gradients of the step before, or a further parameter group.
        """
        if len(self.optimizer.param_groups) > len(self._of_groups):
            self.add_param_group({})
        if self.zenflow_step.micro_batches == 0:
            self.between_steps.taken.refuse_accumulation()
        self.between_steps.end()
        self._refuse_other_backward()
        if last:
            self.between_steps.complete()
        self._in_backward = True
        self.zenflow_step.begin_backward(last=last)

    def _refuse_other_backward(self) -> None:
        # Private: DeepSpeed's buckets, which the end of a backward pass empties.
        if any(bucket.params for bucket in self.ipg_buckets.values()):
            raise other_backward(self.calls)

    def _receive(self, slice_index: int, gradient: Tensor, *, last: bool) -> None:
        """`ZenFlowStep.receive`; raises `MisconfigurationException` for gradients of a backward pass of the user's own."""
        if not self._in_backward:
            raise other_backward(self.calls)
        self.zenflow_step.receive(slice_index, gradient, last=last)
        if last and self._updates_in_backward:
            self._written.note_arrival(self._rank.partition.slices[slice_index].parameter)

    @override
    def report_ipg_memory_usage(self, *_: Any, **__: Any) -> None:
        """Nothing: DeepSpeed's reports are switched off, and it writes their text for each gradient all the same."""

    @override
    def exit_backward(self) -> None:
        """As DeepSpeed's, which has taken all gradients by then."""
        super().exit_backward()
        self._in_backward = False
        self.between_steps.end_backward()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One optimizer step (`ZenFlowStep.step`), and the bookkeeping that DeepSpeed and torch expect of it. Without gradients since the
        last one, nothing.

        Raises:
            MisconfigurationException: the memory of a weight was replaced, or the gradients of some weights; or the step did not use a
                parameter, and `ignore_unused_parameters` is false.
            WorkerError: training has ended.
        """
        if closure is not None:
            raise MisconfigurationException(
                "optimizer.step must have no closure where the optimizer is DeepSpeed's own, got one: take `self.optimizers()`"
            )
        # First: the end of training may move the weights to the CPU, which replaces their memory.
        if self.closed:
            raise WorkerError(
                "training has ended, and the ZenFlow worker of this training has been ended with it: set up the training again"
            )
        self.refuse_asleep()
        self.between_steps.in_update.end()
        # Private: runs torch's hooks around a step, those of all optimizers and those of the user's.
        Optimizer.profile_hook_step(lambda _: self._step())(self.optimizer)

    def _refuse_moved(self) -> None:
        """Refuses weights that are not in the flat buffers any more, where updates reach them; pieces are moved by DeepSpeed only."""

    def _step(self) -> None:
        self._refuse_moved()
        # Private: torch's Optimizer.step sets it; schedulers warn without it that they were stepped first.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.between_steps.follow_dropped()
        if self.zenflow_step.micro_batches == 0:
            # As torch's, which skips parameters without a gradient.
            self.between_steps.taken.refuse_second_step()
            self._refuse_other_backward()
            return
        if self.zenflow_step.is_complete:
            self._written.refuse()
        self.between_steps.complete()
        if not self.ignore_unused_parameters:
            self._refuse_unused()
        scale, finite = self.zenflow_step.step(copies_finite=self.loss_scaler.dynamic)
        # Private: DeepSpeed's engine reads it for `get_global_grad_norm`.
        self._global_grad_norm = scale.norm
        if finite is not None:
            # A dynamic loss scale (fp16) must know on the host whether the step overflowed, and waits for the device.
            with self.telemetry.measure("loss_scale"):
                self.overflow = not bool(finite.read())
            # Private: the loss scaler's own rule, which DeepSpeed's `step` calls.
            self._update_scale(self.overflow)
        if self._written.follows(self.zenflow_step.number):
            self.telemetry.followed_steps += 1
            if self.telemetry.followed_steps == FOLLOWED + 1:
                rank_zero_info("ZenFlow: weights are written in place time and again: each step waits for its updates")
            self.flush()
        self._written.note(self.zenflow_step.number)
        self._is_behind_step = True

    def _refuse_unused(self) -> None:
        """Refuses a step without gradients of parameters of which a rank holds a part. A collective."""
        names, slices = list(self.full_state.parameters), self._rank.partition.slices
        unused = [names[slices[index].parameter] for index in self.parts.fill.unused()]
        error = MisconfigurationException(
            f"the loss of a step must depend on every trained parameter, got none of {', '.join(unused)}:"
            " freeze them, or set DeepSpeed's zero_optimization.ignore_unused_parameters to true"
        )
        raise_together(error if unused else None, MisconfigurationException)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: the ranks divide all parameters at set-up."""
        raise MisconfigurationException(
            "ZenFlowStrategy: add_param_group must not be called in training, since the ranks divide all parameters at set-up; give"
            " `configure_optimizers` all of them, and set their `requires_grad` between steps"
        )

    @property
    def state(self) -> Any:
        """The state of the user's optimizer, when training has ended.

        Raises:
            MisconfigurationException: in training, when the worker has it.
        """
        if not self.closed:
            raise MisconfigurationException(
                "ZenFlowStrategy: optimizer.state must not be used in training, when the worker has AdamW's moments: read and replace them"
                " with `deepspeed.utils.safe_get_full_optimizer_state` and `safe_set_full_optimizer_state`, between steps"
            )
        return self.optimizer.state

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DeepSpeed's, and drops the gradients that no step has used."""
        if self._is_behind_step:
            # DeepSpeed's engine calls it behind each step. Under torch gradients stay until the user's code removes them.
            self._is_behind_step = False
            return
        self.between_steps.drop_gradients()
        super().zero_grad(set_to_none)

    def flush(self) -> None:
        """Makes arena and weights the exact state of all steps so far, which DeepSpeed's checkpoint code then reads.

        Raises:
            WorkerError: the worker has ended, or an interrupted step has been submitted to it; the exact state is lost.
            RuntimeError: this process was forked from the one that trains.
        """
        if self.is_elsewhere:
            raise RuntimeError(
                "a process that was forked from the one that trains has no state of the optimizer: save checkpoints and flush before the"
                " fork, or in the process that trains"
            )
        if self.closed and not self.zenflow_step.is_exact:
            raise WorkerError(
                f"training ended before the worker had applied all of its {self.zenflow_step.number} steps:"
                " the exact optimizer state is lost"
            )
        self.between_steps.in_update.end()
        # What is written to exact weights, a flush leaves as it is: the next forward pass looks for it.
        if changes := not self.zenflow_step.is_exact:
            self.between_steps.has_found_writes()
            self._written.begin_updates()
        try:
            self.zenflow_step.flush()
        except WorkerError:
            # The caller may be ending with an error of its own, and nothing else would end the worker.
            self.close(keep_state=False)
            raise
        if has_written := self._written.take_over():
            self._gather_weights()
            self.zenflow_step.state_written()
        if changes or has_written:
            self._written.note()

    def close(self, *, keep_state: bool | None = None) -> None:
        """Ends the worker and releases the shared memory. May be called again.

        Args:
            keep_state: whether master weights and moments stay readable for as long as DeepSpeed's tensors live, after a regular end of
                the worker; if not, the worker is killed. None: they stay if they are exact.
        """
        if keep_state is None:
            keep_state = self.zenflow_step.is_exact
        if self._worker is not None:
            if keep_state:
                self._worker.close()
            else:
                self._worker.kill()
            self._worker = None
        if not keep_state:
            self._host_state.clear()
        self._rank.arena.close(keep_state=keep_state, take_weights=self._take_weights)

    def _take_weights(self) -> None:
        """Copies weights that are in place (`RankState.weights`) to memory of their own, before the arena's is freed; may be called in the
        middle of construction. For a stage that has none there, nothing.
        """

    def _forget_weights(self) -> None:
        """Drops what refers to the flat buffers of the model's weights."""
        self._rank.forget_weights()
        if self.parts.provisional is not None:
            self.parts.provisional.forget_weights()
        self._forget_copies()

    @property
    def closed(self) -> bool:
        """Whether the worker has been ended."""
        return self._worker is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that trains, which has neither the worker nor the arena's memory."""
        return os.getpid() != self._process

    @override
    def destroy(self) -> None:
        """As DeepSpeed's, and ends the worker if an error has not. May be called again."""
        if self.is_elsewhere:
            return
        self.between_steps.end()
        if not self.closed:
            self.close()
        if not self._destroyed:
            self._leave_users_optimizer()
            self._destroyed = True
            super().destroy()
            # The strategy outlives the training, and a module refers to it.
            self._forget_weights()
            in_pieces.discard(self)
            restore_process()
