"""Substitution of ZenFlow's optimizer for DeepSpeed's while the engine is built."""

from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
import deepspeed.runtime.engine as engine_module
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn import Module

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.overrides import missing_overrides
from lightning_zenflow.zero.broadcast_layout import BroadcastLayout
from lightning_zenflow.zero.environment import RankResources
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer

Built = TypeVar("Built", bound=tuple[Any, ...])


def build_with_zenflow(
    initialize: Callable[[], Built], module: Module, config: ZenFlowConfig, resources: RankResources
) -> tuple[Built, ZenFlowZeroOptimizer]:
    """Calls ``deepspeed.initialize`` so that it builds ZenFlow's optimizer in the place of its ZeRO-1/2 optimizer.

    Private: the engine constructs `DeepSpeedZeroOptimizer` by a module-level name in ``deepspeed.runtime.engine`` and has no other
    extension point. The name is replaced during the call only.

    Args:
        initialize: calls it; the engine is the first item of its result.
        module: the model.
        config: of the optimizer.
        resources: of the rank.

    Returns:
        The result of `initialize`, and the engine's optimizer. After an error the optimizer has been destroyed.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    missing = missing_overrides(ZenFlowZeroOptimizer, DeepSpeedZeroOptimizer)
    if vars(engine_module).get("DeepSpeedZeroOptimizer") is not DeepSpeedZeroOptimizer or missing:
        raise _unsupported(f"missing in DeepSpeedZeroOptimizer: {missing}" if missing else "no name to replace")
    optimizer: ZenFlowZeroOptimizer | None = None
    layout = BroadcastLayout(module)

    def build(*args: Any, **kwargs: Any) -> ZenFlowZeroOptimizer:
        nonlocal optimizer
        layout.restore()
        optimizer = ZenFlowZeroOptimizer(*args, zenflow=config, resources=resources, **kwargs)
        return optimizer

    engine_module.DeepSpeedZeroOptimizer = build
    try:
        built = initialize()
        if optimizer is None or built[0].optimizer is not optimizer:
            raise _unsupported(f"its engine built {type(built[0].optimizer).__name__}")
        return built, optimizer
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        if optimizer is not None:
            optimizer.destroy()
            optimizer.close(keep_state=False)
        raise
    finally:
        layout.restore()
        engine_module.DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer


def _unsupported(what: str) -> RuntimeError:
    return RuntimeError(
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
