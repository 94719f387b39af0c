"""The steps of a training loop, which the user's own code calls under Fabric and Accelerate, in the order that they must have."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine
from lightning_zenflow.stall_monitor import StepMeter


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
    """The steps of one training.

    Args:
        trained: the training.
        micro_batches: whether a step has further ones.
        calls: what the front's user calls, for messages.
        check_saves: raises an error of a save in the background.

    Attributes:
        engine: DeepSpeed's.
        meter: of the steps' times.
        was_interrupted: whether an error has interrupted a backward pass.
    """

    def __init__(
        self, trained: TrainedEngine, micro_batches: MicroBatches, calls: Calls, check_saves: Callable[[], None]
    ) -> None:
        self._trained, self._micro_batches, self._calls = trained, micro_batches, calls
        self._check_saves, self._training = check_saves, trained.training
        self.engine, self.was_interrupted = trained.engine, False
        # DeepSpeed's `gradient_clipping`, of steps without a call that clips; 0: no clipping.
        self._max_norm = trained.training.max_norm
        self._norm_of_step: float | None = None
        # The first step may be clipped: no block is submitted before its factor is known.
        trained.training.max_norm = self._max_norm or math.inf
        self.meter = StepMeter(trained.training)
        # Until the first forward pass.
        self.meter.pause()
        # DeepSpeed keeps engines and models for as long as the process lives, and with them what their hooks refer to.
        module: Module = trained.engine.module
        # Before DeepSpeed's own, which gathers weights.
        forward_hook = module.register_forward_pre_hook(_weak(self._begin_forward), prepend=True)
        flush_hook = module.register_state_dict_pre_hook(_weak(self.flush))  # type: ignore[no-untyped-call]
        for hook in (forward_hook, flush_hook):
            trained.ending.callback(hook.remove)

    def _begin_forward(self) -> None:
        if not self.engine.module.training:
            self._trained.optimizer.sleep.refuse(reads=["lp_params"])
            self.meter.pause()
            self.flush()
        elif torch.is_grad_enabled() and not self._training.in_update.is_active:
            self.meter.resume()
            self._training.before_forward()

    def flush(self) -> None:
        """Makes weights and optimizer states exact; see `ZenFlowStrategy.flush`."""
        self.make_exact()
        self._check_saves()

    def make_exact(self) -> None:
        """As `flush`, at the begin of a save, which raises errors of the one before."""
        step = self._training.steps
        if step.is_complete and not (self.was_interrupted or step.was_interrupted):
            raise RuntimeError(
                f"weights are read between {self._calls.backward} and optimizer.step: call `optimizer.step()` before, or"
                " `optimizer.zero_grad()` to drop the gradients"
            )
        self._trained.flush()

    @contextmanager
    def backward(self, module: Module | None) -> Iterator[None]:
        """Context of a backward pass of a micro-batch; see `ZenFlowStrategy.backward`."""
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
        if step.micro_batches == 0:
            # The step before may have been dropped.
            self._norm_of_step = None
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
        """Clips this step's gradients; see `ZenFlowStrategy.clip_gradients_norm`."""
        call = self._calls.clip
        # NumPy's numbers are no floats.
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not float(max_norm) > 0:
            raise MisconfigurationException(f"{call}: max_norm must be a number > 0, got {max_norm!r}")
        if float(norm_type) != 2.0:
            raise MisconfigurationException(f"{call}: norm_type must be 2 under ZenFlow, got {norm_type!r}")
        self._refuse_without_gradients(call)
        # Who clips twice has clipped to the smaller norm.
        self._norm_of_step = min(float(max_norm), math.inf if self._norm_of_step is None else self._norm_of_step)
        return self._training.gradient_norm()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step; see `ZenFlowStrategy.optimizer_step`."""
        self._refuse_without_gradients("optimizer.step")
        max_norm, self._norm_of_step = self._norm_of_step, None
        self._training.max_norm = self._max_norm if max_norm is None else max_norm
        self.engine.set_gradient_accumulation_boundary(True)
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
