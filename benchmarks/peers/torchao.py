"""torchao's offloaded optimizer as Lightning can use it. Imported only where it is used: the import of torchao takes seconds."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torchao.optim import CPUOffloadOptimizer
from typing_extensions import override


class HostAdamW(CPUOffloadOptimizer):  # type: ignore[misc]  # torchao's optimizers have no type information
    """Fused AdamW on the host, parameter by parameter: gradients leave the device in backward, weights return in the step.

    Configured as its documentation recommends. Master weights, moments and gradients have the dtype of the model's weights. Gradients are
    copied before they could be clipped.

    Args:
        parameters: on a CUDA device.
        lr: learning rate.
        weight_decay: decoupled weight decay coefficient.

    Raises:
        AssertionError: there is neither CUDA nor XPU.
    """

    def __init__(self, parameters: Iterable[Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, offload_gradients=True, lr=lr, weight_decay=weight_decay)

    @property
    @override
    def state(self) -> dict[Tensor, Any]:
        """Empty: Lightning, which needs the attribute, would move the state to the model's device."""
        return {}
