"""DeepSpeed's own ZenFlow as a Lightning strategy, run as its users would run it."""

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.peers.zero_offload import ZeroOffload

_ZENFLOW_BLOCK = {
    "topk_ratio": 0.05,
    "update_interval": 4,
    "select_strategy": "step",
    "select_interval": 64,
    "overlap_step": True,
    "full_warm_up_rounds": 0,
}
"""Configuration in every benchmark: the share of columns and the interval of `ZenFlowStrategy` with S = 4."""


def _show_transposed_weights(optimizer: ZenFlowZeroOptimizer, group_index: int) -> None:
    """Makes the parameters views of the flat buffer, in which matrices are transposed."""
    flat = optimizer.bit16_groups_flat[group_index]
    for parameter, meta, offset in zip(
        optimizer.round_robin_bit16_groups[group_index],
        optimizer.round_robin_bit16_meta[group_index],
        optimizer.round_robin_bit16_offsets[group_index],
        strict=True,
    ):
        values = flat.narrow(0, offset, meta.numel())
        parameter.data = values.view(meta.shape[::-1]).t() if meta.ndim == 2 else values.view(meta.shape)


class DeepSpeedZenFlow(ZeroOffload):
    """DeepSpeed's own ZenFlow.

    It needs what follows, which is done here:

    - The optimizer is part of the DeepSpeed config, since one from `configure_optimizers` raises TypeError. All parameters form one group
      with the first group's values. The key adam_w_mode is omitted, which its optimizer of the selected columns does not accept.
    - DeepSpeed builds the scheduler and returns it to Lightning. It copies each step's learning rate to the optimizer of the selected
      columns after that step's backward. Between boundaries, where those columns are updated in backward, their rate is therefore
      the one of the step before.
    - DeepSpeed sets its gradient accumulation to `update_interval`: it divides the loss by it and updates with the window's mean gradient.
      Lightning still takes one optimizer step a batch. The loss that Lightning logs is not divided.
    - Its optimizer process ignores the end of training; it is terminated.

    DeepSpeed 0.19.8 scrambles all matrices before the first step: ZenFlow keeps them transposed in ZeRO's flat buffer, and
    `DeepSpeedZeroOptimizer._update_model_bit16_weights` reads them untransposed. A pre-trained model is destroyed; random weights are as
    good as before.

    Gradients of the CPU's columns are clipped by their window's norm, those of the selected columns are not clipped.

    Args:
        repair: read the transposed matrices as such.
        **options: of Lightning's `DeepSpeedStrategy`.
    """

    def __init__(self, *, repair: bool, **options: Any) -> None:
        super().__init__(**options)
        self._repair = repair
        self._schedule: Callable[[int], float] | None = None

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        optimizer, scheduler = self._init_optimizers()
        assert scheduler is not None and isinstance(scheduler.scheduler, LambdaLR)
        self._schedule = scheduler.scheduler.lr_lambdas[0]
        group = optimizer.param_groups[0]
        assert isinstance(self.config, dict)
        self.config["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": group["initial_lr"],
                "betas": list(group["betas"]),
                "eps": group["eps"],
                "weight_decay": group["weight_decay"],
            },
        }
        self.config["zero_optimization"]["zenflow"] = dict(_ZENFLOW_BLOCK)
        super()._initialize_deepspeed_train(model)

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        schedule = self._schedule
        assert schedule is not None
        if self._repair:
            # For the rest of this process, which trains nothing else.
            ZenFlowZeroOptimizer._update_model_bit16_weights = _show_transposed_weights
        built: tuple[Any, Optimizer]
        built = super()._setup_model_and_optimizer(model, optimizer, lambda optimizer: LambdaLR(optimizer, schedule))
        return built

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Bypasses ZenFlowStrategy, which keeps DeepSpeed from dividing the loss.
        return DeepSpeedStrategy.backward(self, closure_loss, optimizer, *args, **kwargs)

    @override
    def teardown(self) -> None:
        process = getattr(getattr(self.model, "optimizer", None), "process", None)
        if process is not None:
            process.terminate()
            process.join()
        super().teardown()
