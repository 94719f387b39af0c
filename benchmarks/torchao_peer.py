"""torchao's optimizer on the host, as Lightning can use it. Imported by the method that needs it alone: torchao's import takes seconds."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torchao.optim import CPUOffloadOptimizer
from typing_extensions import override


class HostAdamW(CPUOffloadOptimizer):  # type: ignore[misc]  # torchao's optimizers have no type information
    """AdamW on the host, one parameter after the other: gradients go down in backward, each updated weight comes back in the step.

    It is used as its documentation says: torch's fused AdamW on the CPU, and gradients leave the device as soon as they are on the host.
    Master weights, moments and gradients have the type of the model's weights. It copies gradients before they could be clipped.

    Args:
        parameters: on a CUDA device.
        lr: learning rate.
        weight_decay: coefficient of the decay.

    Raises:
        AssertionError: there is neither CUDA nor XPU.
    """

    def __init__(self, parameters: Iterable[Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, offload_gradients=True, lr=lr, weight_decay=weight_decay)

    @property
    @override
    def state(self) -> dict[Tensor, Any]:
        """Nothing: Lightning moves what it finds here to the model's device, where this optimizer's state must not be.

        torchao's class has no such attribute, without which Lightning fails.
        """
        return {}
