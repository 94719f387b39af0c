"""ZenFlow for PyTorch Lightning: train a model that does not fit its GPU's memory, without waiting for the CPU."""

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.strategy import ZenFlowStrategy, register

__all__ = ["ZenFlowConfig", "ZenFlowStrategy"]

register()
