"""The strategy for `lightning.fabric.Fabric`. Importing it registers ``Fabric(strategy="zenflow")``.

What Fabric and the Trainer do alike is in `lightning_zenflow.session`; only Fabric's hooks may enter.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_zenflow.fabric.strategy import ZenFlowStrategy
from lightning_zenflow.registration import add_name

__all__ = ["ZenFlowStrategy"]

add_name(STRATEGY_REGISTRY, ZenFlowStrategy)
