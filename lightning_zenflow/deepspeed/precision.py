"""Lightning's precision for DeepSpeed, with types of weights and batches as under its other strategies."""

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_zenflow.core.autocast import complete_autocast
from lightning_zenflow.core.errors import MisconfigurationException

if TYPE_CHECKING:
    from lightning.fabric.plugins import DeepSpeedPrecision
else:
    # Lightning has this class three times, for Fabric and for each of its Trainers: each front's is a subclass of one of them.
    DeepSpeedPrecision = object


_types: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()
"""Of parameters and buffers that are float32 for as long as their module is trained."""


def restore_types(module: Module) -> None:
    """Gives parameters and buffers of a module the types that they had before `convert_module`, after training."""
    for tensor in (*module.parameters(), *module.buffers()):
        if (before := _types.get(tensor)) is not None:
            tensor.data = tensor.data.to(before)
            del _types[tensor]


class PlainPrecision(DeepSpeedPrecision):
    """Leaves what a model gets, and gives, as it is with "32-true": float64 stays float64."""

    @override
    def convert_module(self, module: Module) -> Module:
        """With "32-true", buffers and frozen parameters keep their types; trained ones become float32, as their master weights are, and
        so do those with a fraction that are in one module with them, and buffers of 16 bits there, until `restore_types`.
        """
        if self.precision != "32-true":
            return super().convert_module(module)
        others = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        trained = {parameter for _, parameter in others}
        for part in module.modules():
            own = [p for p in part.parameters(recurse=False) if p.is_floating_point()]
            if not trained.isdisjoint(own):
                # Parametrizations are modules of their own.
                buffers = part.buffers(recurse=isinstance(part, ParametrizationList))
                for tensor in (*own, *(b for b in buffers if b.dtype in (torch.bfloat16, torch.float16))):
                    _types.setdefault(tensor, tensor.dtype)
                    tensor.data = tensor.data.float()
        if others:
            rank_zero_info(
                f"ZenFlow: {len(others)} trained parameters are float32 in training with precision='32-true', {others[0][0]} the first;"
                " freeze them to keep their types, or set another precision"
            )
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_input(data)

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        """With mixed precision `torch.autocast`, which Fabric's plugin lacks; weights have 16 bits, and buffers their own types."""
        if "mixed" not in self.precision:
            return super().forward_context()
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        complete_autocast(device := get_accelerator().device_name())
        return torch.autocast(device, dtype=dtype, cache_enabled=False)


def own_precision(plugin: Any, ours: type[Any]) -> Any:
    """The plugin that a strategy has for the one that Lightning or the user gives it.

    Args:
        plugin: Lightning's, the user's own, or None.
        ours: subclass of Lightning's precision for DeepSpeed.
    """
    lightnings: type[Any] = ours.__bases__[-1]
    if not isinstance(plugin, lightnings | None):
        raise MisconfigurationException(
            f"ZenFlowStrategy: a precision plugin must be a {lightnings.__name__}, got {type(plugin).__name__}: set `precision`"
            " instead, without a plugin"
        )
    # A user's own subclass stays.
    return ours(plugin.precision) if plugin is not None and type(plugin) is lightnings else plugin
