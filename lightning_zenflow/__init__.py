"""ZenFlow for PyTorch Lightning: train a model that does not fit its GPU's memory, without waiting for the CPU.

The import makes the name "zenflow" known to the Trainer and to Fabric. Each public name is imported when it is used first: DeepSpeed takes
seconds more.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.monitor.callbacks import StallMonitor
    from lightning_zenflow.strategy import ZenFlowStrategy

__all__ = ["StallMonitor", "ZenFlowConfig", "ZenFlowStrategy"]

_MODULES = {
    "StallMonitor": "lightning_zenflow.monitor.callbacks",
    "ZenFlowConfig": "lightning_zenflow.config",
    "ZenFlowStrategy": "lightning_zenflow.strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def _strategy_of(module: str) -> Callable[..., Any]:
    return lambda **options: import_module(module).ZenFlowStrategy(**options)


for _registry, _module in (
    (StrategyRegistry, "lightning_zenflow.strategy"),
    (STRATEGY_REGISTRY, "lightning_zenflow.fabric"),
):
    # An import after a failed one comes here again.
    _registry.register("zenflow", _strategy_of(_module), "ZeRO-2 offload without stalls (ZenFlow)", override=True)
