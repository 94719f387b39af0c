"""The strategy for `lightning.fabric.Fabric`.

What Fabric and the Trainer do alike is in `lightning_zenflow.session`; only Fabric's hooks may enter.
"""

from lightning_zenflow.fabric.strategy import ZenFlowStrategy

__all__ = ["ZenFlowStrategy"]
