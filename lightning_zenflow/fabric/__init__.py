"""The strategy for `lightning.fabric.Fabric`."""

from lightning_zenflow.fabric.strategy import ZenFlowStrategy

__all__ = ["ZenFlowStrategy"]
