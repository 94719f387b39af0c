"""Substitution of ZenFlow's optimizer for DeepSpeed's while the engine is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import deepspeed.runtime.engine as engine_module
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn import Module

from lightning_zenflow.core.overrides import missing_overrides
from lightning_zenflow.zero.broadcast_layout import BroadcastLayout
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


@contextmanager
def zenflow_optimizer(factory: Callable[..., ZenFlowZeroOptimizer], module: Module) -> Iterator[None]:
    """Makes ``deepspeed.initialize`` build its ZeRO-1/2 optimizer with `factory`; an error in the context destroys the optimizer.

    Args:
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context.

    Private: the engine constructs `DeepSpeedZeroOptimizer` by a module-level name in ``deepspeed.runtime.engine`` and has no other
    extension point. The name is replaced inside this context only.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    missing = missing_overrides(ZenFlowZeroOptimizer, DeepSpeedZeroOptimizer)
    if vars(engine_module).get("DeepSpeedZeroOptimizer") is not DeepSpeedZeroOptimizer or missing:
        raise RuntimeError(
            _unsupported(f"missing in DeepSpeedZeroOptimizer: {missing}" if missing else "no name to replace")
        )
    built: list[ZenFlowZeroOptimizer] = []

    layout = BroadcastLayout(module)

    def build(*args: Any, **kwargs: Any) -> ZenFlowZeroOptimizer:
        layout.restore()
        built.append(factory(*args, **kwargs))
        return built[-1]

    engine_module.DeepSpeedZeroOptimizer = build
    try:
        yield
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        for unused in built:
            unused.destroy()
            unused.close(keep_state=False)
        raise
    finally:
        layout.restore()
        engine_module.DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer


def optimizer_of(engine: Any) -> ZenFlowZeroOptimizer:
    """Optimizer of an engine that was initialised in `zenflow_optimizer`.

    Raises:
        RuntimeError: the engine built another optimizer.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, ZenFlowZeroOptimizer):
        raise RuntimeError(_unsupported(f"its engine built {type(optimizer).__name__}"))
    return optimizer


def _unsupported(what: str) -> str:
    return (
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
