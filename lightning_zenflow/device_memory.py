"""Whether the device has room for what could live in host memory as well."""

import torch

_RESERVE = 0.05
"""Share of the device's memory that is left alone: what the allocator loses between tensors, and batches that are longer."""


def has_room(n_bytes: float, device: torch.device) -> bool:
    """Whether so many bytes are free beside all that the device held at the same time so far; yes where the device is the host.

    To be asked in backward, when the device's memory has been as full as it gets.
    """
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return bool(free + unused >= n_bytes + _RESERVE * total)
