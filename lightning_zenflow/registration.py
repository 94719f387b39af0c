"""Registers the strategy's name with Lightning as soon as both are imported, in any order, without importing either.

``import lightning_zenflow`` is enough for ``Trainer(strategy="zenflow")``. It does not import torch, Lightning and DeepSpeed, which take
seconds: the command line needs none of them for its help.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from typing_extensions import override

_STRATEGY = "lightning_zenflow.strategy"
"""Named, not imported: this module is imported before all others, and DeepSpeed with that one."""


def register() -> None:
    """Makes Lightning know the name "zenflow", and `pytorch_lightning` what to answer; idempotent."""
    when_imported("lightning.pytorch.strategies", lambda strategies: add_name(strategies.StrategyRegistry))
    when_imported("pytorch_lightning.strategies", _let_pytorch_lightning_refuse)


def add_name(registry: Any, strategy: Callable[..., Any] | None = None) -> None:
    """Adds the name to a registry of Lightning's strategies, unless it is there.

    Args:
        registry: the Trainer's or Fabric's.
        strategy: makes the strategy; None: the Trainer's.
    """
    if "zenflow" not in registry:
        registry.register("zenflow", strategy or _new_strategy, description="ZeRO-2 offload without stalls (ZenFlow)")


def other_lightning() -> Exception:
    """The error for a Trainer of `pytorch_lightning`, whose classes are others than those of `lightning.pytorch`."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    return MisconfigurationException(
        "ZenFlowStrategy: the Trainer must be of the package lightning, got one of pytorch_lightning;"
        " write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`, everywhere"
    )


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with a module: now if it has been imported, otherwise when it is imported.

    Args:
        name: full name of the module, which need not be installed.
        action: may be called in the middle of an import; must not import what the module's package imports later.
    """
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportWatch(name, action))


class _ImportWatch(MetaPathFinder):
    """Waits in `sys.meta_path` for the import of one module."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Before the search of the other finders, which would come here again. It is over even if the import fails.
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self._action)
        return spec


class _ActingLoader(Loader):
    """Loads by another loader, then acts."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        # Tracebacks and `inspect` read sources through the module's loader.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


def _new_strategy(**options: Any) -> Any:
    return import_module(_STRATEGY).ZenFlowStrategy(**options)


def _let_pytorch_lightning_refuse(strategies: ModuleType) -> None:
    """Lets a Trainer of `pytorch_lightning` take the name and the class, which then say what to do instead.

    Left alone, it answers that an instance of ZenFlowStrategy is an invalid strategy name.
    """
    if "zenflow" not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register("zenflow", _refuse)
    # `Strategy` is an abstract base class: `isinstance` is then true. ZenFlowStrategy refuses the Trainer's accelerator.
    when_imported(_STRATEGY, lambda ours: strategies.Strategy.register(ours.ZenFlowStrategy))


def _refuse(**_: Any) -> None:
    raise other_lightning()
