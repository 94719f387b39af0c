"""AdamW whose moments are kept in bfloat16, rounded to nearest after every step, to compare `moments_dtype` with."""

from typing import Any

from typing_extensions import override

from benchmarks.peers.zero_offload import ZeroOffload


class RoundedMoments(ZeroOffload):
    """ZeRO-2 offload whose moments have values of bfloat16 between steps. A step itself computes in 32 bits."""

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # DeepSpeed's optimizer around the module's, whose state holds one flat partition for each parameter group.
        for state in self.deepspeed_engine.optimizer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return output
