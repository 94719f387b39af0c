"""The strategy for `lightning.fabric.Fabric`: the user's own training loop, on the same session as the Trainer's strategy."""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import DeepSpeedPrecision
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.config import KEYS, ZenFlowConfig
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.deepspeed.environment import PlainPrecision, inference_engine
from lightning_zenflow.deepspeed.users_objects import own_precision, refuse_unsupported_module, validate_optimizer
from lightning_zenflow.fabric_checkpoints import FabricCheckpoints
from lightning_zenflow.monitor.summary import StepMeter
from lightning_zenflow.offload.step import ZenFlowStep
from lightning_zenflow.session import Built


class ZenFlowPrecision(PlainPrecision, DeepSpeedPrecision):
    """`PlainPrecision`, which says all of it, for Fabric."""

    @override
    def convert_output(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_output(data)


class ZenFlowStrategy(FabricCheckpoints, DeepSpeedStrategy):
    """Trains with ZeRO-2, or ZeRO-3, and the optimizer states in host memory, without waiting for the CPU.

    ``Fabric(strategy=ZenFlowStrategy(topk_ratio=0.05))`` is complete; the loop stays as it is::

        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            fabric.backward(model(batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

    All micro-batches of a step but the last run under `fabric.no_backward_sync(model)`. Weights are exact after `fabric.save`,
    `model.state_dict()`, `optimizer.state_dict()`, a forward pass in evaluation mode and `flush`, which all ranks call together.

    `teardown`, which all ranks call together behind `flush` or `fabric.save`, gives the modules back as they were before `fabric.setup`,
    with their weights as they are then. Fabric does not call it. Without it, the worker ends with the process, or when nothing refers to
    model, optimizer and Fabric any more; a LightningModule refers to its Fabric.

    Args:
        config: source of the keys that are not given as keywords: a `ZenFlowConfig`, an OmegaConf YAML file or DictConfig, or a DeepSpeed
            configuration (JSON file or dict) with or without a ``zero_optimization.zenflow`` block.
        **options: keys of `ZenFlowConfig`, and keywords of Fabric's `DeepSpeedStrategy`, such as `stage` or `timeout`.

    Raises:
        ValueError: a key has a value that is not allowed.
        MisconfigurationException: a keyword is unknown; `config` cannot be read, or asks DeepSpeed for what ZenFlow does not support.
    """

    calls = Calls(
        setup="model, optimizer = fabric.setup(model, optimizer)",
        backward="fabric.backward",
        clip="fabric.clip_gradients",
        accumulate="run all micro-batches of a step but the last under `fabric.no_backward_sync(model)`",
        read="behind `fabric.backward`",
        write="before the forward pass or behind `optimizer.step`",
    )
    belongs_to_the_loop: ClassVar[Mapping[str, str]] = {
        "optimizer": "give it to `fabric.setup(model, optimizer)`",
        "scheduler": "call its `step()` in the loop",
        "gradient_accumulation_steps": "use `fabric.no_backward_sync(model)` for all micro-batches of a step but the last",
    }
    """Keys of a DeepSpeed configuration that are refused, with what to do instead."""
    deepspeed_strategy = DeepSpeedStrategy
    precision_class = ZenFlowPrecision

    def __init__(self, config: ZenFlowConfig | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        keys = {key: options.pop(key) for key in KEYS if key in options}
        super().__init__(config, keys, options)
        for key, instead in self.belongs_to_the_loop.items():
            if self.config.get(key) not in (None, "auto", 1):
                raise MisconfigurationException(
                    f"DeepSpeed config: {key} must be absent with Fabric, got {self.config[key]!r}: {instead}"
                )
        if "stall_monitor" in self.zenflow_config.model_fields_set and self.zenflow_config.stall_monitor:
            rank_zero_info(
                "ZenFlow: stall_monitor has no effect in a loop: log `strategy.metrics()` and `strategy.summary()`"
            )
        # DeepSpeed clips to 1 where nothing is said.
        self.config = {"gradient_clipping": 0.0, **self.config}
        # DeepSpeed's, of models that are not trained; a user may drop them before.
        self._inference: weakref.WeakSet[Module] = weakref.WeakSet()
        # Whether an error has interrupted a backward pass.
        self._was_interrupted = False
        self.micro_batches = MicroBatches()
        # Lightning's own extension point, though its name is private; `DeepSpeedStrategy` has none.
        self._backward_sync_control = self.micro_batches
        # DeepSpeed's `gradient_clipping`, of steps without a call of `fabric.clip_gradients`; 0: no clipping.
        self._max_norm = 0.0
        self._norm_of_step: float | None = None
        self._meter: StepMeter | None = None
        # Fabric tears nothing down.
        weakref.finalize(self, self._ending.close)

    @property
    @override
    def precision(self) -> Any:
        """Fabric's precision, as this package has it."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        # Private: where Fabric looks for one that the user gave the strategy.
        self._precision = own_precision(precision, self.precision_class)

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:
        """None for one rank, which has all batches: Fabric leaves its samplers as they are."""
        return None if self.is_alone else super().distributed_sampler_kwargs

    @override
    def setup_module(self, module: Module) -> Any:
        """Sets up a further model, for inference only."""
        engine = inference_engine(module, self.config, self.root_device)
        self._inference.add(engine)
        return engine

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Sets up the model that is trained, with one optimizer, AdamW or Adam. The loop calls the scheduler's `step()`, as under Fabric's
        other strategies.

        Raises:
            MisconfigurationException: ZenFlow does not support the model or the optimizer, or there are several.
        """
        if len(optimizers) != 1:
            raise MisconfigurationException(
                f"fabric.setup: ZenFlowStrategy must have one optimizer, got {len(optimizers)}: use its parameter groups"
            )
        if self.zenflow_optimizer is not None:
            raise MisconfigurationException(
                "fabric.setup: ZenFlowStrategy must have one model with an optimizer, got a second one: for models that are not trained"
                " call `fabric.setup_module(model)`, and train another one with another Fabric"
            )
        (user_optimizer,) = optimizers
        # Private: calls `deepspeed.initialize`, as in the base class' own set-up.
        initialize = partial(self._initialize_engine, module, user_optimizer)
        engine, *_ = self._begin_training(initialize, module, user_optimizer)
        # Private: as in the base class' own set-up.
        self._set_deepspeed_activation_checkpointing()
        return engine, [engine.optimizer], scheduler

    def _begin_training(self, initialize: Callable[[], Built], module: Module, optimizer: Optimizer | None) -> Built:
        """Checks what is trained, and sets up what the loop's calls need; otherwise as `_set_up`."""
        refuse_unsupported_module(module)
        if optimizer is not None:
            validate_optimizer(optimizer, module)
        built = self._set_up(initialize, module, optimizer)
        # Private: Fabric's own attribute, which it writes to where the loop names the model in `fabric.backward`.
        self._deepspeed_engine = self._trained
        assert self.zenflow_optimizer is not None
        self._max_norm = self.zenflow_optimizer.clip_grad
        # The first step may be clipped: no block is submitted before its factor is known.
        self.zenflow_optimizer.clip_grad = self._max_norm or math.inf
        self._meter = StepMeter(self.zenflow_optimizer.training)
        # Until the first forward pass.
        self._meter.pause()
        # DeepSpeed keeps engines and models for as long as the process lives, and with them what their hooks refer to.
        # Before DeepSpeed's own, which gathers weights.
        forward_hook = module.register_forward_pre_hook(_weak(self._begin_forward), prepend=True)
        flush_hook = module.register_state_dict_pre_hook(_weak(self.flush))  # type: ignore[no-untyped-call]
        for hook in (forward_hook, flush_hook):
            self._ending.callback(hook.remove)
        return built

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward pass of a micro-batch; the last of a step is the one outside of `fabric.no_backward_sync`.

        Raises:
            RuntimeError: the step's last micro-batch was before; `module` is not the model with the optimizer; a backward pass before this
                one was interrupted by an error.
        """
        call = self.calls.backward
        step, engine = self._usable_step(call), self._trained
        if module is not engine:
            raise RuntimeError(f"{call}: model must be the one that was set up with the optimizer, got another")
        if step.is_complete:
            raise RuntimeError(
                f"{call} was called twice in a step, or after clipping: call `optimizer.step()` between them, or"
                f" {self.calls.accumulate}, and clip after the last"
            )
        if step.micro_batches == 0:
            # The step before may have been dropped.
            self._norm_of_step = None
        self._trained.set_gradient_accumulation_boundary(not self.micro_batches.more_to_come)
        self._was_interrupted = True
        super().backward(tensor, module, *args, **kwargs)
        self._was_interrupted = False

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips this step's gradients by the norm of the whole gradient, to the smallest that is given. Backward passes of later steps
        predict the clip factor with it.

        Args:
            module: the model.
            optimizer: its optimizer.
            max_norm: largest norm, > 0; infinity: no clipping.
            norm_type: 2.
            error_if_nonfinite: has no effect: the device would have to be waited for. A step whose norm is not finite changes nothing.

        Returns:
            Norm before clipping, of the gradients of all ranks: 0-D float32 on the device.

        Raises:
            MisconfigurationException: `max_norm` or `norm_type` has a value that is not allowed.
            RuntimeError: no backward pass was before.
        """
        call = self.calls.clip
        given: Any = max_norm  # NumPy's numbers are no floats
        if isinstance(given, bool) or not isinstance(given, Real) or not float(given) > 0:
            raise MisconfigurationException(f"{call}: max_norm must be a number > 0, got {max_norm!r}")
        if float(norm_type) != 2.0:
            raise MisconfigurationException(f"{call}: norm_type must be 2 under ZenFlow, got {norm_type!r}")
        self._after_backward(call)
        # Who clips twice has clipped to the smaller norm.
        self._norm_of_step = min(float(max_norm), math.inf if self._norm_of_step is None else self._norm_of_step)
        assert self.zenflow_optimizer is not None
        return self.zenflow_optimizer.training.clip()

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        raise MisconfigurationException(
            f"fabric.clip_gradients: clip_val must be absent under ZenFlow, got {clip_val!r}: it clips by norm only, with max_norm"
        )

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The step; a learning rate scheduler steps in the loop.

        Raises:
            MisconfigurationException: there is a closure.
            RuntimeError: no backward pass was before, or an error interrupted one.
        """
        if kwargs:
            raise MisconfigurationException(
                f"optimizer.step must be without arguments under ZenFlow, got {', '.join(kwargs)}: call `{self.calls.backward}` before"
            )
        self._after_backward("optimizer.step")
        max_norm, self._norm_of_step = self._norm_of_step, None
        assert self.zenflow_optimizer is not None
        self.zenflow_optimizer.clip_grad = self._max_norm if max_norm is None else max_norm
        self._trained.set_gradient_accumulation_boundary(True)
        output = super().optimizer_step(self._trained)
        assert self._meter is not None
        self._meter.end_step()
        return output

    @override
    def flush(self, *, in_save: bool = False) -> None:
        """Makes weights and optimizer states exact; all ranks call it together, between two steps.

        Raises:
            RuntimeError: a step has its gradients and has not been done.
        """
        step = None if self.zenflow_optimizer is None else self.zenflow_optimizer.training.steps
        if step is not None and step.is_complete and not (self._was_interrupted or step.was_interrupted):
            raise RuntimeError(
                f"weights are read between {self.calls.backward} and optimizer.step: call `optimizer.step()` before, or"
                " `optimizer.zero_grad()` to drop the gradients"
            )
        super().flush(in_save=in_save)

    def metrics(self) -> dict[str, float]:
        """This rank's metrics of the steps since the last call, for ``fabric.log_dict(fabric.strategy.metrics())``.

        Time from a forward pass in evaluation mode to the next one in training is not part of a step.

        Returns:
            Values by the names of docs/tuning.md; none before the first step, and none between two calls without a step.
        """
        return {} if self._meter is None else self._meter.metrics()

    def summary(self) -> str | None:
        """Step times and waits so far, with a line of advice if something limits; None before the second step."""
        return None if self._meter is None else self._meter.summary()

    @override
    def _in_engines(self) -> Sequence[Module]:
        return [*([] if self._trained is None else [self._trained]), *self._inference]

    @property
    @override
    def _ends_together(self) -> bool:
        # As in a `finally` behind the loop.
        return not self._was_interrupted and sys.exc_info()[0] is None

    def _usable_step(self, what: str) -> ZenFlowStep:
        optimizer = self.zenflow_optimizer
        if optimizer is None or optimizer.training.closed:
            ended = "training has ended" if optimizer is not None else "no model has been set up"
            raise RuntimeError(f"{what}: {ended}; call `{self.calls.setup}` before")
        if self._was_interrupted:
            raise RuntimeError(
                f"{what}: an error has interrupted a backward pass, of which gradients are left; start again from a checkpoint"
            )
        return optimizer.training.steps

    def _after_backward(self, what: str) -> ZenFlowStep:
        step = self._usable_step(what)
        if step.was_interrupted:
            raise RuntimeError(
                f"{what}: an exception has interrupted the step before; go on with `optimizer.zero_grad()`, which makes the state exact,"
                " with that step or without it"
            )
        if step.micro_batches == 0:
            raise RuntimeError(f"{what} must come after `{self.calls.backward}(loss)`, got none since the last step")
        return step

    def _begin_forward(self) -> None:
        assert self._meter is not None and self.zenflow_optimizer is not None
        if not self._trained.module.training:
            self.zenflow_optimizer.sleep.refuse(reads=["lp_params"])
            self._meter.pause()
            self.flush()
        elif torch.is_grad_enabled() and not self.zenflow_optimizer.training.in_update.is_active:
            self._meter.resume()
            self._begin_micro_batch()


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


def _weak(method: Callable[[], None]) -> Callable[..., None]:
    """A hook that calls a method for as long as its object is alive."""
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        if (alive := reference()) is not None:
            alive()

    # Of a module that is compiled as a whole.
    disabled: Callable[..., None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled
