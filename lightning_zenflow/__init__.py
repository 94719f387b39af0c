"""ZenFlow for PyTorch Lightning: train a model that does not fit its GPU's memory, without waiting for the CPU."""

import contextlib
import sys

# DeepSpeed's logger keeps the standard output that it finds on its first import, and warns right away where there is no GPU. Standard
# output is for results: `lightning-zenflow estimate --json` must print JSON and nothing else.
with contextlib.redirect_stdout(sys.stderr):
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.monitor.stall_monitor import StallMonitor
    from lightning_zenflow.strategy import ZenFlowStrategy, register

__all__ = ["StallMonitor", "ZenFlowConfig", "ZenFlowStrategy"]

register()
