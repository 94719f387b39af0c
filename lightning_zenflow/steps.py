"""The steps of a training, as each front's calls make them: which backward pass is the last, by which norm a step is clipped, the step."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.environment import PlainPrecision
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine
from lightning_zenflow.step_meter import StepMeter

if TYPE_CHECKING:
    from lightning.pytorch.plugins import DeepSpeedPrecision as _DeepSpeedPrecision
else:
    # As of `PlainPrecision`.
    _DeepSpeedPrecision = object


class TrainerPrecision(PlainPrecision, _DeepSpeedPrecision):
    """With mixed precision batches stay as they are as well.

    Attributes:
        max_norm: DeepSpeed's `gradient_clipping`, of steps for which the Trainer and the module clip nothing.
        norm_of_step: largest norm of the next step; None: `clip_gradients` has not been called for it.
    """

    max_norm = 0.0
    norm_of_step: float | None = None

    @override
    def convert_input(self, data: Any) -> Any:
        return data if "mixed" in self.precision else super().convert_input(data)

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own for Trainers, beside that for Fabric
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, ZenFlowOptimizer):
            kind = type(optimizer)
            raise MisconfigurationException(
                f"ZenFlowStrategy: trainer.optimizers must be the strategy's own, got {kind.__module__}.{kind.__qualname__}, whose"
                " `step` is not called: use hooks such as `on_train_batch_end`, or `register_step_post_hook` of the optimizer"
            )
        result = closure()
        # In manual optimization the step's last backward pass may have been any.
        optimizer.training.complete()
        optimizer.training.max_norm = self.max_norm if self.norm_of_step is None else self.norm_of_step
        # Private: calls `on_before_optimizer_step` and, by `configure_gradient_clipping`, `clip_gradients`.
        self._after_closure(model, optimizer)
        self.norm_of_step = None
        with optimizer.in_engines_step():
            model.trainer.model.step(**kwargs)
        return result

    @override
    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Sets the largest norm of this step; 0: no clipping."""
        if clip_val > 0:
            if gradient_clip_algorithm != "norm":
                raise MisconfigurationException(
                    f"gradient_clip_algorithm must be 'norm' under ZenFlowStrategy, got {str(gradient_clip_algorithm)!r}"
                )
            # A module may give the Trainer's wrapper of the optimizer.
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            # Who clips twice has clipped to the smaller norm.
            self.norm_of_step = min(float(clip_val), math.inf if self.norm_of_step is None else self.norm_of_step)
            optimizer.training.max_norm = optimizer.training.gradients.max_norm = self.norm_of_step


class TrainerSteps:
    """The steps of one training by a Trainer. `clips_itself`: whether the module has its own `configure_gradient_clipping`."""

    def __init__(self, trained: TrainedEngine, module: pl.LightningModule, plugin: Any, *, clips_itself: bool) -> None:
        self._engine, self._training, self._clips_itself = trained.engine, trained.training, clips_itself
        self._module, self._trainer = module, module.trainer
        self._n_in_closure = 0  # backward passes in the present closure of `optimizer.step`
        # A plugin of the user's sets no norms.
        self._plugin = plugin if isinstance(plugin, TrainerPrecision) else None
        if self._plugin is not None and self._trainer.gradient_clip_val is None:
            self._plugin.max_norm = self._training.max_norm

    def begin_batch(self) -> None:
        """Before a batch."""
        self._engine.set_gradient_accumulation_boundary(False)
        if self._plugin is not None and self._module.automatic_optimization:
            # What the backward pass predicts clip factors from; in manual optimization the norm that was given last.
            given = self._training.max_norm or math.inf if self._clips_itself else self._trainer.gradient_clip_val
            self._training.max_norm = given or self._plugin.max_norm
        self._training.before_forward()
        self._training.start_epoch(self._trainer.current_epoch)

    def training_step(self, forward: Callable[[], Any]) -> Any:
        """The forward pass of a micro-batch. Lightning's DeepSpeed plugin checks only the output of a step's last one."""
        output = self._training.run_forward(forward)
        if output is None and self._module.automatic_optimization:
            raise MisconfigurationException(
                "ZenFlowStrategy: training_step must return a loss, got None, which would block the other ranks: to skip a batch,"
                " return any output times zero"
            )
        return output

    def begin_backward(self) -> None:
        """Before a backward pass, by the Trainer or by `manual_backward`.

        A step's last is the one in the closure of `optimizer.step`, if the closure before had one only. Elsewhere only the call of
        `optimizer.step`, or the closure's end, tells that there are no more, and updates begin then.
        """
        self._n_in_closure += 1
        step = self._training.steps
        if self._plugin is not None:
            if step.micro_batches == 0:
                self._plugin.norm_of_step = None
            is_over = step.is_complete and not self._module.automatic_optimization
            if is_over or self._plugin.norm_of_step is not None:
                raise MisconfigurationException(
                    "ZenFlowStrategy: a step must have no backward pass behind `clip_gradients`, and no second one in the closure of"
                    " `optimizer.step` where the closure before had one only; call `manual_backward` for the others before `optimizer.step`"
                )
        self._training.before_backward(last=self._engine.is_gradient_accumulation_boundary())

    @contextmanager
    def step(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Context of a step: the closure that runs its last micro-batches, forward and backward, if there are some in `closure`."""
        steps, is_automatic = self._training.steps, self._module.automatic_optimization
        set_boundary = self._engine.set_gradient_accumulation_boundary
        set_boundary(is_automatic or steps.has_single_backward)
        self._n_in_closure = 0

        def complete() -> Any:
            output = closure()
            # A step without a closure says nothing about later ones, nor does one of automatic optimization.
            if self._n_in_closure and not is_automatic:
                steps.has_single_backward = self._n_in_closure == 1
            set_boundary(True)
            return output

        yield complete
        # In manual optimization another one may begin in the same batch.
        set_boundary(False)


# Private: Lightning's base class of what `fabric.no_backward_sync` calls; strategies have no other way to provide it.
class MicroBatches(_BackwardSyncControl):
    """Whether the step has further micro-batches. ZeRO reduces the gradients of each, because a rank keeps its part only."""

    more_to_come = False

    @contextmanager
    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> Iterator[None]:
        before, self.more_to_come = self.more_to_come, self.more_to_come or enabled
        try:
            yield
        finally:
            self.more_to_come = before


class LoopSteps:
    """The steps of one training by a user's own loop, under Fabric and Accelerate, in the order that they must have. `check_saves` raises
    an error of a save in the background; `was_interrupted` tells whether an error has interrupted a backward pass.
    """

    def __init__(self, trained: TrainedEngine, micro_batches: MicroBatches, check_saves: Callable[[], None]) -> None:
        self._trained, self._micro_batches, self._calls = trained, micro_batches, trained.training.calls
        self._check_saves, self._training = check_saves, trained.training
        self.engine, self.was_interrupted = trained.engine, False
        # DeepSpeed's `gradient_clipping`, of steps that no call clips; 0: no clipping.
        self._max_norm = trained.training.max_norm
        # The first step may be clipped: no block is submitted before its factor is known.
        trained.training.max_norm = self._max_norm or math.inf
        self.meter = StepMeter(trained.training.parts, trained.training.config)
        # Until the first forward pass.
        self.meter.pause()
        # DeepSpeed keeps engines and models for as long as the process lives, and with them what their hooks refer to.
        module: Module = trained.engine.module
        # Before DeepSpeed's own, which gathers weights.
        trained.ending.callback(module.register_forward_pre_hook(_weak(self._begin_forward), prepend=True).remove)
        flush_hook = module.register_state_dict_pre_hook(_weak(self.flush))  # type: ignore[no-untyped-call]
        trained.ending.callback(flush_hook.remove)

    def _begin_forward(self) -> None:
        if not self.engine.module.training:
            self._trained.optimizer.sleep.refuse(reads=["lp_params"])
            self.meter.pause()
            self.make_exact(lays_down=False)
            self._check_saves()
        elif torch.is_grad_enabled() and not self._training.in_update.is_active:
            self.meter.resume()
            self._training.before_forward()

    def flush(self) -> None:
        """`ZenFlowStrategy.flush`."""
        self.make_exact()
        self._check_saves()

    def make_exact(self, *, lays_down: bool = True) -> None:
        """As `flush`, before a save, which raises errors of the one before, or, without `lays_down`, before weights are read."""
        step = self._training.steps
        if step.is_complete and not (self.was_interrupted or step.was_interrupted):
            raise RuntimeError(
                f"weights are read between {self._calls.backward} and optimizer.step: call `optimizer.step()` before, or"
                " `optimizer.zero_grad()` to drop the gradients"
            )
        self._trained.flush(lays_down=lays_down)

    @contextmanager
    def backward(self, module: Module | None) -> Iterator[None]:
        """Context of a micro-batch's backward pass."""
        call = self._calls.backward
        self._refuse_ended(call)
        step, engine = self._training.steps, self.engine
        if module is not engine:
            raise RuntimeError(f"{call}: model must be the one that was set up with the optimizer, got another")
        if step.is_complete:
            raise RuntimeError(
                f"{call} was called twice in a step, or after clipping: call `optimizer.step()` between them, or"
                f" {self._calls.accumulate}, and clip after the last"
            )
        is_last = not self._micro_batches.more_to_come
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.was_interrupted = True
        try:
            self._training.before_backward(last=is_last)
        except MisconfigurationException:
            # Nothing has begun.
            self.was_interrupted = False
            raise
        yield
        self.was_interrupted = False

    def clip(self, max_norm: Any, norm_type: float) -> Tensor:
        """`ZenFlowStrategy.clip_gradients_norm`."""
        call = self._calls.clip
        # NumPy's numbers are no floats.
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not float(max_norm) > 0:
            raise MisconfigurationException(f"{call}: max_norm must be a number > 0, got {max_norm!r}")
        if float(norm_type) != 2.0:
            raise MisconfigurationException(f"{call}: norm_type must be 2 under ZenFlow, got {norm_type!r}")
        self._refuse_without_gradients(call)
        gradients = self._training.gradients
        # Who clips twice has clipped to the smaller norm.
        gradients.max_norm = min(float(max_norm), math.inf if gradients.max_norm is None else gradients.max_norm)
        return self._training.gradient_norm()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        self._refuse_without_gradients("optimizer.step")
        max_norm = self._training.gradients.max_norm
        self._training.max_norm = self._max_norm if max_norm is None else max_norm
        self.engine.set_gradient_accumulation_boundary(True)
        with self._trained.optimizer.in_engines_step():
            yield
        self.meter.end_step()

    def _refuse_ended(self, what: str) -> None:
        if self._training.closed:
            raise RuntimeError(f"{what}: training has ended; call `{self._calls.setup}` before")
        if self.was_interrupted:
            raise RuntimeError(
                f"{what}: an error has interrupted a backward pass, of which gradients are left; start again from a checkpoint"
            )

    def _refuse_without_gradients(self, what: str) -> None:
        self._refuse_ended(what)
        step = self._training.steps
        if step.was_interrupted:
            raise RuntimeError(
                f"{what}: an exception has interrupted the step before; go on with `optimizer.zero_grad()`, which makes the state exact,"
                " with that step or without it"
            )
        if step.micro_batches == 0:
            raise RuntimeError(f"{what} must come after `{self._calls.backward}(loss)`, got none since the last step")


def _weak(method: Callable[[], None]) -> Callable[..., None]:
    """A hook that calls a method for as long as its object is alive."""
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        if (alive := reference()) is not None:
            alive()

    # Of a module that is compiled as a whole.
    disabled: Callable[..., None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled


@contextmanager
def naming_late_reads() -> Iterator[None]:
    """Context of a backward pass: an error of ours for torch's, which has no class, where the pass uses what has been written in place."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise MisconfigurationException(
            "ZenFlowStrategy: a backward pass must not use a weight whose gradient is there already, as of `weight.detach()`, of layers"
            " with `requires_grad_(False)` in a part of the forward pass, or of one in two checkpoints without use_reentrant=False: weights"
            " are updated in backward. Set update_interval=1 and overlap_step=False, which update them behind it. Or another tensor was"
            f" written in place: {error}"
        ) from error
