"""DeepSpeed's own ways to train, as Lightning strategies.

They are run as their users would run them. Both need a GPU under Lightning's `DeepSpeedStrategy`; here they run on the CPU by the part of
`ZenFlowStrategy` that makes DeepSpeed do so, and by nothing else of it.
"""

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero.config import set_bucket_size


class ZeroOffload(ZenFlowStrategy):
    """DeepSpeed's own ZeRO-2 offload with the model's optimizer, which is torch's AdamW on 32-bit master weights.

    Gradient buckets are as large as ours, which is faster than Lightning's default for models of less than 200 million parameters.

    Args:
        default_buckets: whether they have Lightning's default size instead.
    """

    def __init__(self, *, default_buckets: bool = False) -> None:
        super().__init__()
        self._default_buckets = default_buckets

    @override
    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        # As DeepSpeed's guides advise; ours page-locks its own memory instead.
        self.config["zero_optimization"]["offload_optimizer"]["pin_memory"] = self.root_device.type == "cuda"

    @override
    def _setup_model_and_optimizer(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        if not self._default_buckets:
            assert isinstance(self.config, dict)
            set_bucket_size(self.config, model)
        return DeepSpeedStrategy._setup_model_and_optimizer(self, model, *args, **kwargs)

    # DeepSpeed counts micro-batches itself, and its ZenFlow the steps of a window by them.
    handles_gradient_accumulation = DeepSpeedStrategy.handles_gradient_accumulation

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return DeepSpeedStrategy.optimizer_step(self, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DeepSpeedStrategy.on_train_batch_start(self, batch, batch_idx)


_ZENFLOW_BLOCK = {
    "topk_ratio": 0.05,
    "update_interval": 4,
    "select_strategy": "step",
    "select_interval": 64,
    "overlap_step": True,
    "full_warm_up_rounds": 0,
}
"""What every benchmark compares with: the same share of columns and the same interval as ours at S = 4."""


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

    What its users have to do, and is done here:
    - The optimizer stands in the DeepSpeed config, since one from `configure_optimizers` raises TypeError; so all parameters are one group.
      It takes the first group's values. The key adam_w_mode must not be there: its optimizer of the selected columns does not know it.
    - The schedule of `configure_optimizers` is handed to DeepSpeed, which hands it back to Lightning. DeepSpeed copies each step's learning
      rate to the optimizer of the selected columns after that step's backward; between boundaries, where those columns are
      updated during backward, their rate is therefore the one of the step before.
    - DeepSpeed sets its gradient accumulation to `update_interval`, so it divides the loss by it and updates with the window's mean
      gradient. Lightning still takes one optimizer step a batch. The loss that Lightning logs is not divided.
    - Its optimizer process ignores the end of training; it is terminated.

    Under DeepSpeed 0.19.8 all matrices are scrambled before the first step: ZenFlow keeps each one transposed in ZeRO's flat buffer, and
    `DeepSpeedZeroOptimizer._update_model_bit16_weights` reads it as if it were not. That destroys a pre-trained model; random weights
    are as good as before. `repair` makes the method read what is there.

    Its code clips the gradient of the columns that the CPU updates, by their window's norm, and not that of the selected ones.
    """

    def __init__(self, *, repair: bool) -> None:
        super().__init__()
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
        return super()._setup_model_and_optimizer(model, optimizer, lambda built: LambdaLR(built, schedule))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Past ZenFlowStrategy, which keeps DeepSpeed from dividing the loss.
        return DeepSpeedStrategy.backward(self, closure_loss, optimizer, *args, **kwargs)

    @override
    def teardown(self) -> None:
        process = getattr(getattr(self.model, "optimizer", None), "process", None)
        if process is not None:
            process.terminate()
            process.join()
        super().teardown()
