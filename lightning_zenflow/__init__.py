"""ZenFlow for PyTorch Lightning and torch: train a model that does not fit its GPU's memory, without waiting for the CPU.

The import makes the names "zenflow" and "zenflow_adamw" known to the Trainer and to Fabric, and imports neither Lightning nor DeepSpeed:
each public name is imported when it is used first.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.optimizer.offload_adamw import OffloadAdamW
    from lightning_zenflow.stall_monitor import StallMonitor
    from lightning_zenflow.strategy import ZenFlowStrategy

__all__ = ["OffloadAdamW", "StallMonitor", "ZenFlowConfig", "ZenFlowStrategy"]

_MODULES = {
    "OffloadAdamW": "lightning_zenflow.optimizer.offload_adamw",
    "StallMonitor": "lightning_zenflow.stall_monitor",
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


_REGISTRIES = {
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_zenflow.fabric"),
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_zenflow.strategy"),
}
"""Lightning's modules with a registry, its name, and the module whose strategy it gets."""


def _register(strategies: ModuleType) -> None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_zenflow.core.errors import catch_as

    catch_as(MisconfigurationException)
    registry, module = _REGISTRIES[strategies.__name__]
    register(getattr(strategies, registry), module)


class _Registering(SourceFileLoader):
    """Finds and loads Lightning's modules with a registry, and registers the names when one is there."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _REGISTRIES else None
        if spec is not None and spec.origin is not None:
            spec.loader = cls(fullname, spec.origin)
        return spec

    @override
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _register(module)


for _name in _REGISTRIES.keys() & sys.modules.keys():
    _register(sys.modules[_name])
sys.meta_path.insert(0, _Registering)
