"""ZenFlow for PyTorch Lightning: train a model that does not fit its GPU's memory, without waiting for the CPU.

The import makes the names "zenflow" and "zenflow_adamw" known to the Trainer and to Fabric. Each public name is imported when it is used
first: DeepSpeed takes seconds more. The command `lightning-zenflow` imports no Lightning where it needs none.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def register(registry: Any, module: str) -> None:
    """Makes a module's strategy known to a registry of Lightning; the module is imported when a strategy is made.

    "zenflow" has the defaults. "zenflow_adamw" ends every step with AdamW's weights: nothing is late (S = 1, d = 0), and clip factors are
    the true ones. A step waits for the CPU only if it is clipped, or the two before it.
    """

    def make(**options: Any) -> Any:
        return import_module(module).ZenFlowStrategy(**options)

    # An import after a failed one comes here again.
    registry.register("zenflow", make, "ZeRO-2 offload without stalls (ZenFlow)", override=True)
    adamw = {"update_interval": 1, "publish_lag": 0, "clip_prediction": False}
    registry.register("zenflow_adamw", make, "ZenFlow with AdamW's own weights in every step", override=True, **adamw)


def _register_names() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zenflow.core.errors import catch_as

    catch_as(MisconfigurationException)
    register(StrategyRegistry, "lightning_zenflow.strategy")
    register(STRATEGY_REGISTRY, "lightning_zenflow.fabric")


# The command's script, which uses no names.
if Path(sys.argv[0] if sys.argv else "").name != "lightning-zenflow":
    _register_names()
