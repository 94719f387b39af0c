"""AdamW whose moments are kept in bfloat16, rounded to nearest or stochastically after every step, to compare `moments_dtype` with."""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.peers.zero_offload import ZeroOffload


class RoundedMoments(ZeroOffload):
    """ZeRO-2 offload whose moments have values of bfloat16 between steps. A step itself computes in 32 bits.

    Args:
        exp_avg_sq: how the second moment is rounded. The first one is always rounded to nearest.
    """

    def __init__(self, exp_avg_sq: Literal["nearest", "stochastic"]) -> None:
        super().__init__()
        self._stochastic = exp_avg_sq == "stochastic"
        self._generator = torch.Generator().manual_seed(17)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # DeepSpeed's optimizer around the module's, whose state holds one flat partition for each parameter group.
        for state in self.deepspeed_engine.optimizer.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
            v = state["exp_avg_sq"]
            v.copy_(self._rounded_stochastically(v) if self._stochastic else v.bfloat16())
        return output

    def _rounded_stochastically(self, values: Tensor) -> Tensor:
        """One of the two neighbours in bfloat16, up with the probability that the distance to the lower one has."""
        noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, generator=self._generator)
        return (values.view(torch.int32) + noise).bitwise_and(-1 << 16).view(torch.float32)
