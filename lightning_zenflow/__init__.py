"""ZenFlow for PyTorch Lightning: train a model that does not fit its GPU's memory, without waiting for the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zenflow.registration import register

if TYPE_CHECKING:
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.monitor.stall_monitor import StallMonitor
    from lightning_zenflow.strategy import ZenFlowStrategy

__all__ = ["StallMonitor", "ZenFlowConfig", "ZenFlowStrategy"]

_MODULES = {
    "StallMonitor": "lightning_zenflow.monitor.stall_monitor",
    "ZenFlowConfig": "lightning_zenflow.config",
    "ZenFlowStrategy": "lightning_zenflow.strategy",
}
"""Imported when the name is used first: torch, Lightning and DeepSpeed take seconds."""

register()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
