"""What Lightning and DeepSpeed need to be told where the model trains on the CPU."""

import os
from collections.abc import Sequence

import torch


def use_deepspeed_on_cpu() -> None:
    """DeepSpeed chooses one accelerator per process, and CUDA where there is any; training on the CPU needs its CPU accelerator."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())


def with_local_ranks(devices: Sequence[torch.device]) -> list[torch.device]:
    """The devices of a host's ranks, those on the CPU with the local rank as index.

    Lightning leaves CPU devices without index; its check, like DeepSpeed's, wants the local rank there.
    """
    if all(device.type == "cpu" for device in devices):
        return [torch.device("cpu", rank) for rank in range(len(devices))]
    return list(devices)


_NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class RankVariables:
    """What the environment says about ranks when this is made."""

    def __init__(self) -> None:
        self._values = {name: os.environ.get(name) for name in _NAMES}

    def restore(self) -> None:
        """Makes the environment say that again: whoever inherits it afterwards would take itself for a rank of the former training."""
        for name, value in self._values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
