"""Buffers that half precision must leave alone."""

from __future__ import annotations

import torch
from torch import nn


class Float32Buffers:
    """The float32 buffers that a model does not save, to be put back after its conversion to half precision.

    In Llama these are the frequencies by which positions turn. Lightning and DeepSpeed convert them with the weights; rounded to bfloat16
    they are off by up to 0.4 %: at position 500, by 0.6 radians. Pretrained weights would meet positions that they have never seen.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember the buffers of `model`, which has not been converted yet."""
        saved = model.state_dict().keys()
        self._values = {
            name: buffer.detach().clone()
            for name, buffer in model.named_buffers()
            if name not in saved and buffer.dtype == torch.float32
        }

    def put_back(self, model: nn.Module) -> None:
        """Give them back to `model`, on the devices where it is now."""
        for name, value in self._values.items():
            owner, _, leaf = name.rpartition(".")
            device = model.get_buffer(name).device
            model.get_submodule(owner).register_buffer(leaf, value.to(device), persistent=False)
