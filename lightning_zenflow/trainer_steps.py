"""The Trainer's steps: which backward pass is a step's last, by which norm it is clipped, and the step, by Lightning's precision plugin."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.environment import PlainPrecision
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.training import Training

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
        """Runs the closure, which may have been run before, the hooks between backward and step, and the step.

        Raises:
            MisconfigurationException: something wraps the optimizer.
        """
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
        model.trainer.model.step(**kwargs)
        return result

    @override
    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Sets the largest norm of this step, which may be another one in each step.

        Raises:
            MisconfigurationException: `gradient_clip_algorithm` is not "norm".
        """
        if clip_val > 0:
            if gradient_clip_algorithm != "norm":
                raise MisconfigurationException(
                    f"gradient_clip_algorithm must be 'norm' under ZenFlowStrategy, got {str(gradient_clip_algorithm)!r}"
                )
            # A module may give the Trainer's wrapper of the optimizer.
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            norm = float(clip_val)
            # Who clips twice has clipped to the smaller norm.
            self.norm_of_step = norm if self.norm_of_step is None else min(norm, self.norm_of_step)
            optimizer.training.max_norm = self.norm_of_step


class TrainerSteps:
    """The steps of one training.

    Args:
        strategy: Lightning's part of the Trainer's strategy.
        engine: DeepSpeed's.
        training: of its optimizer.
        clips_itself: whether the module has its own `configure_gradient_clipping`.
    """

    def __init__(self, strategy: DeepSpeedStrategy, engine: Any, training: Training, *, clips_itself: bool) -> None:
        self._engine, self._training, self._clips_itself = engine, training, clips_itself
        self._n_in_closure = 0  # backward passes in the present closure of `optimizer.step`
        # Another one is not this package's, which sets no norms.
        plugin: Any = strategy.precision_plugin
        self._plugin = plugin if isinstance(plugin, TrainerPrecision) else None
        assert strategy.lightning_module is not None
        self._module, self._trainer = strategy.lightning_module, strategy.lightning_module.trainer
        if self._plugin is not None and self._trainer.gradient_clip_val is None:
            self._plugin.max_norm = training.max_norm

    def begin_batch(self) -> None:
        """Before a batch."""
        self._engine.set_gradient_accumulation_boundary(False)
        training = self._training
        if self._plugin is not None and self._module.automatic_optimization:
            # What the backward pass predicts clip factors from; in manual optimization the norm that was given last.
            given = training.max_norm or math.inf if self._clips_itself else self._trainer.gradient_clip_val
            training.max_norm = given or self._plugin.max_norm
        training.before_forward()
        training.start_epoch(self._trainer.current_epoch)

    def end_forward(self, output: Any) -> None:
        """Behind the forward pass of a micro-batch, which has given `output`."""
        # Lightning's DeepSpeed plugin checks only the last micro-batch of a step.
        if output is None and self._module.automatic_optimization:
            raise MisconfigurationException(
                "ZenFlowStrategy: training_step must return a loss, got None, which would block the other ranks: to skip a batch,"
                " return any output times zero"
            )

    def begin_backward(self) -> None:
        """Before a backward pass of a micro-batch, by the Trainer or by `manual_backward`.

        The last one of a step is that in the closure of `optimizer.step`, if the closure before had one only. Elsewhere only the call of
        `optimizer.step`, or the closure's end, tells that there are no more, and the step's updates begin behind it.
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

    def begin_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Before a step; returns the closure that runs its last micro-batches, forward and backward, if there are some in `closure`."""
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

        return complete

    def end_step(self) -> None:
        """Behind a step: in manual optimization another one may begin in the same batch."""
        self._engine.set_gradient_accumulation_boundary(False)
