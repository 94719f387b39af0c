"""What DeepSpeed's optimizers around a `Training` have in common, whatever the stage of ZeRO."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.core.device import Stream, runtime_of
from lightning_zenflow.core.errors import MisconfigurationException, other_backward, unused
from lightning_zenflow.core.process import raise_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.core.step_inputs import GroupHyperparameters, read_hyperparameters
from lightning_zenflow.deepspeed.flat_buffers import Layout, ReorderedStates, slices_of
from lightning_zenflow.deepspeed.sleep import Sleep
from lightning_zenflow.deepspeed.users_module import in_pieces, restore_process, whole_shape
from lightning_zenflow.deepspeed.users_objects import UsersOptimizer
from lightning_zenflow.offload.build import Engine, RankPart
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from lightning_zenflow.training import Training
from lightning_zenflow.worker.process import WorkerError


class ZenFlowOptimizer(ZeROOptimizer, Engine):  # type: ignore[misc]  # DeepSpeed has no type information
    """A ZeRO offload optimizer whose step does not wait for the CPU (ZenFlow, arXiv 2505.12242). The class of a stage extends this and
    DeepSpeed's of that stage, says where the weights lie and routes the reduced gradients.

    DeepSpeed keeps its part: flat model weights, gradient buckets and their reduction, checkpoint format, the engine around it. Its fp32
    partitions and AdamW's moments are in the arena, where DeepSpeed's checkpoint code reads them. `training` gets gradients and steps.
    """

    namespace: ClassVar[ModuleType]
    """Module in which DeepSpeed's engine finds the class that a stage's class extends, the last of its bases."""
    state_key: ClassVar[str]
    """Key of AdamW's state in DeepSpeed's."""
    # DeepSpeed's own, of its classes of both stages.
    optimizer: Optimizer
    param_names: dict[Tensor, str]
    dp_process_group: dist.ProcessGroup
    ipg_buckets: dict[torch.dtype, Any]
    loss_scaler: Any
    ignore_unused_parameters: bool
    _update_scale: Callable[[bool], None]
    _restore_from_bit16_weights: Callable[[], None]

    def __init__(self, *args: Any, training: Training, users: UsersOptimizer | None, **kwargs: Any) -> None:
        # Before DeepSpeed's constructor, which calls `_start_training`.
        self.training, self._destroyed, self._is_behind_step = training, False, False
        (given,) = (argument for argument in args if isinstance(argument, Optimizer))
        self.users = UsersOptimizer(given) if users is None else users
        self.reordered, self.sleep = ReorderedStates(training), Sleep(training)
        try:
            super().__init__(*args, **kwargs)
            self.users.take()
        except BaseException:
            if not training.closed:
                training.end(keep_state=False)
            raise
        # Lightning's `LearningRateMonitor` reads them, as from torch's.
        self.defaults = dict(given.defaults)
        full_state = training.full_state
        # Private: what `deepspeed.utils.safe_get_full_fp32_param` and the like call; under stage 3 only the gradient's. DeepSpeed's own
        # read views of the arena, which may be some updates behind.
        for name, added in full_state.parameters.items():
            # With the first, `safe_get_full_grad` calls the second, whatever stands in `parameter.grad`.
            added._hp_grad, added.get_full_hp_grad = True, partial(full_state.gradient, name)
            added.get_full_hp_param = partial(full_state.read, name)
            added.set_full_hp_param = partial(full_state.write, name)
            added.set_full_hp_grad = partial(full_state.refuse_gradient, name)

    def _start_training(self, **of_stage: Any) -> None:
        """Replaces DeepSpeed's host buffers by the arena and starts the worker; `of_stage` is what `RankPart` has besides."""
        groups = [{self.param_names[p]: p for p in filter(is_optimized_parameter, g)} for g in self.users.params]
        shapes = {name: whole_shape(p) for group in groups for name, p in group.items()}
        part = RankPart(
            optimizer=self.optimizer,
            groups=groups,
            module_order=list(self.param_names.values()),
            shapes=shapes,
            slices=slices_of(self.layouts, shapes, dist.get_rank(group=self.dp_process_group)),
            # Under stage 3 that on which parameters are gathered, and not that of a piece.
            device=next(iter(groups[0].values())).device,
            group=self.dp_process_group if dist.get_world_size(group=self.dp_process_group) > 1 else None,
            **of_stage,
        )
        self.training.start(part, self)

    @property
    def clip_grad(self) -> float:
        """`Training.max_norm`, by DeepSpeed's name."""
        return self.training.max_norm

    @clip_grad.setter
    def clip_grad(self, max_norm: float) -> None:
        self.training.max_norm = max_norm

    @override
    def read_groups(self) -> list[GroupHyperparameters]:
        return read_hyperparameters(self.optimizer)

    @override
    def refuse_use(self) -> None:
        if self.sleep.away:
            self.sleep.refuse()
        if len(self.optimizer.param_groups) > len(self.users.params):
            self.add_param_group({})

    @override
    def refuse_other_backward(self) -> None:
        if any(bucket.params for bucket in self.ipg_buckets.values()):
            raise other_backward(self.training.calls)

    def refuse_moved(self) -> None:
        """Refuses weights that have left the flat buffers, where updates reach them. Pieces are moved by DeepSpeed only."""

    @property
    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """Layout of each flat partition in training."""

    @property
    def saved_layouts(self) -> Sequence[Layout]:
        """The same in checkpoints."""
        return self.layouts

    def reserve(self, disk: DiskCopies) -> None:
        """`ReorderedStates.reserve`."""
        self.reordered.reserve(disk, self.layouts, self.saved_layouts)

    def _wait_for(self, stream: Stream | None) -> None:
        """Orders the training stream behind one of DeepSpeed's, if that is another one."""
        if stream is not None:
            runtime_of(self.training.parts.rank.device).current_stream().wait_stream(stream)

    @override
    def report_ipg_memory_usage(self, *_: Any, **__: Any) -> None:
        """Nothing: DeepSpeed formats this report for each gradient, also where reports are switched off."""

    @override
    def exit_backward(self) -> None:
        """As DeepSpeed's, which has taken all gradients by then."""
        super().exit_backward()
        self.training.end_backward()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise MisconfigurationException(
                "optimizer.step must have no closure where the optimizer is DeepSpeed's own, got one: take `self.optimizers()`"
            )
        # First: the end of training may move the weights to the CPU, which replaces their memory.
        if self.training.closed:
            raise WorkerError(
                "training has ended, and the ZenFlow worker of this training has been ended with it: set up the training again"
            )
        self.refuse_use()
        self.training.in_update.end()
        # Private: runs torch's hooks around a step, those of all optimizers and those of the user's.
        Optimizer.profile_hook_step(lambda _: self._step())(self.optimizer)

    def _step(self) -> None:
        self.refuse_moved()
        # Private: torch's Optimizer.step sets it; schedulers warn without it that they were stepped first.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        # A dynamic loss scale (fp16) must know on the host whether the step overflowed, and waits for the device.
        done = self.training.step(asks_finite=self.loss_scaler.dynamic)
        if done is None:
            return
        # Private: DeepSpeed's engine reads it for `get_global_grad_norm`.
        self._global_grad_norm, finite = done
        if finite is not None:
            self.overflow = not finite
            # Private: the loss scaler's own rule, which DeepSpeed's `step` calls.
            self._update_scale(self.overflow)
        self._is_behind_step = True

    @override
    def refuse_unused(self) -> None:
        # A collective: a rank knows of the parameters that it holds a part of.
        if not self.ignore_unused_parameters:
            names, slices = list(self.training.full_state.parameters), self.training.parts.rank.partition.slices
            found = [names[slices[index].parameter] for index in self.training.parts.fill.unused()]
            error = unused(found, ", or set DeepSpeed's zero_optimization.ignore_unused_parameters to true")
            raise_together(error if found else None, MisconfigurationException)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: the ranks divide all parameters at set-up."""
        raise MisconfigurationException(
            "ZenFlowStrategy: add_param_group must not be called in training, since the ranks divide all parameters at set-up; give"
            " `configure_optimizers` all of them, and set their `requires_grad` between steps"
        )

    @property
    def state(self) -> Any:
        """The state of the user's optimizer, when training has ended; in training, when the worker has it, MisconfigurationException."""
        if not self.training.closed:
            raise MisconfigurationException(
                "ZenFlowStrategy: optimizer.state must not be used in training, when the worker has AdamW's moments: read and replace them"
                " with `deepspeed.utils.safe_get_full_optimizer_state` and `safe_set_full_optimizer_state`, between steps"
            )
        return self.optimizer.state

    @contextmanager
    def in_engines_step(self) -> Iterator[None]:
        """Context of a step of DeepSpeed's engine, which calls `zero_grad` behind ours."""
        try:
            yield
        finally:
            # After an error it may not have: the next call is the user's.
            self._is_behind_step = False

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._is_behind_step:
            # By DeepSpeed's engine. Under torch gradients stay until the user's code removes them.
            self._is_behind_step = False
            return
        self.training.drop_gradients()
        super().zero_grad(set_to_none)

    @override
    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Flushes, and frees memory of the device until `reload_states` (`Sleep`). All ranks call both together, by DeepSpeed's engine.

        `include` has "lp_params": weights and the state of device-owned columns; "contiguous_grad_buffer": stage 3's bucket. None: all.
        Sums over micro-batches leave with any of them, and with "lp_grads", which DeepSpeed's engine passes on under stage 2 only.
        `non_blocking` has no effect: memory is free when the call returns.
        """
        if not self.sleep.away:
            self.refuse_moved()
        new = self.sleep.begin(include)
        # DeepSpeed's drops what is gathered, and stage 3's buckets.
        super().offload_states(new & {OffloadStateTypeEnum.contiguous_grad_buffer}, device, pin_memory)
        self.sleep.release(new, self.param_names, pin_memory=pin_memory)

    @override
    def reload_states(self, non_blocking: bool = False) -> None:
        super().reload_states()
        self.sleep.wake()

    @override
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state with exact master weights and moments, and what else continues this run bit for bit."""
        self.training.flush()
        with self.users.as_deepspeeds():
            state: dict[str, Any] = super().state_dict()
            state[self.state_key] = self.training.host_state.as_saved(state[self.state_key], self.reordered.copies)
            state[CHECKPOINT_KEY] = self.training.state_dict()
            return state

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MisconfigurationException(
            "ZenFlowStrategy: optimizer.load_state_dict must not be called in training, when the worker has AdamW's moments: continue"
            " from a checkpoint (`fit(ckpt_path=...)`, `fabric.load`), or write single states with"
            " `deepspeed.utils.safe_set_full_optimizer_state`"
        )

    def load_partitions(self, saved: Mapping[str, Any], *, optimizer_states: bool) -> None:
        """Continues from this rank's state in a folder, right after a flush; all ranks call it together. `saved` has "attributes" of
        DeepSpeed's optimizer; "partitions": for each flat partition master weights and moments, [partition_numel], any type; and what else
        `Training.load` has. Without `optimizer_states` only weights are loaded.
        """
        attributes = saved["attributes"]
        for name, value in attributes.items():
            # One that is fixed is that of the configuration; another precision has another one.
            if "loss_scale" not in name or (attributes["loss_scaler"].dynamic and self.loss_scaler.dynamic):
                setattr(self, name, value)
        self.training.host_state.load(saved["partitions"], moments=optimizer_states)
        self.training.continue_from(saved if optimizer_states else None)

    def reset_master_from_model(self) -> None:
        """Makes the model's weights, loaded from elsewhere right after a flush, the master weights; moments stay."""
        # Private: DeepSpeed's own way to do the same with its buffers.
        self._restore_from_bit16_weights()
        self.training.steps.start_over(int(self.training.steps.count))
        self.gather_weights()
        self.training.written.note()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which DeepSpeed saves the exact state, behind `reserve`; entered and left by all ranks together."""
        self.reordered.gather(self.layouts, self.saved_layouts)
        try:
            yield
        finally:
            self.reordered.copies = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context of a load, entered and left by all ranks together; not while weights have left the device."""
        self.sleep.refuse()
        try:
            yield
        finally:
            # What has been loaded is not the user's write.
            self.training.written.note()

    def _forget_weights(self) -> None:
        """Drops what refers to the flat buffers of the model's weights."""
        self.training.parts.rank.forget_weights()
        if self.training.parts.provisional is not None:
            self.training.parts.provisional.forget_weights()
        self.sleep.forget()

    @override
    def destroy(self) -> None:
        """As DeepSpeed's, and ends the worker if an error has not. May be called again."""
        training = self.training
        if training.is_elsewhere:
            return
        training.allow_all()
        if not training.closed:
            training.end()
        if not self._destroyed:
            self.users.leave()
            self._destroyed = True
            super().destroy()
            # The strategy outlives the training, and a module refers to it.
            self._forget_weights()
            in_pieces.discard(self)
            restore_process()
