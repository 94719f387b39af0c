"""Layout of a model's parameters while DeepSpeed sends them to all ranks."""

import torch
from torch.nn import Module


class BroadcastLayout:
    """Makes every parameter contiguous, with a dimension at least, and gives scalars their shape back in `restore`.

    DeepSpeed's engine broadcasts each parameter as a tensor of bytes, which torch makes of such memory only. Its optimizer, which comes
    next, copies all trained parameters into contiguous memory anyway, and needs their own shapes.

    Args:
        module: the model. Parameters in another memory format, such as `torch.channels_last`, are contiguous from now on.
    """

    def __init__(self, module: Module) -> None:
        self._scalars = [p for p in module.parameters() if p.dim() == 0]
        for parameter in module.parameters():
            flat = parameter.data.reshape(-1)
            if flat.stride() != (1,):
                # Not by `contiguous`: it leaves the stride of one element as it is.
                flat = flat.clone(memory_format=torch.contiguous_format)
            parameter.data = flat.view(parameter.shape or (1,))

    def restore(self) -> None:
        """Gives scalars their shape back. May be called again."""
        for scalar in self._scalars:
            scalar.data = scalar.data.view(())
