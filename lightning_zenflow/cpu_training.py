"""What Lightning and DeepSpeed need to be told where the model trains on the CPU."""

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
