"""The `Trainer` of Hugging Face's transformers, and those that extend it, with the optimizer of this package.

Written against transformers 5.23, whose module `trainer` names the class of its accelerator, and whose `_get_grad_norm` is private.
"""

from typing import Any
from unittest.mock import patch

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from transformers import Trainer
from typing_extensions import override

from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.core.errors import OtherBases

_LOGGED = ("stall/device_percent", "stall/host_percent", "overlap/worker_busy_percent", "overlap/late_blocks_percent")


class ZenFlowTraining(OtherBases):  # type: ignore[misc]
    """Mixin of a `Trainer`, before it in the order of base classes: ``class ZenFlowSFTTrainer(ZenFlowTraining, SFTTrainer): ...``.

    Keys of ZenFlow are those of the block ``zero_optimization.zenflow`` of `TrainingArguments.deepspeed`, as DeepSpeed's own ZenFlow reads
    them; without a DeepSpeed configuration all have their defaults. Checkpoints are those of the Trainer under DeepSpeed.

    Beside the training's loss the Trainer logs the share of the time in which the device and this thread wait for the CPU, how busy the
    worker is, and the share of the blocks that are late, by the names of docs/tuning.md. `accelerator.strategy.metrics()` has all.
    """

    accelerator: ZenFlowAccelerator
    is_deepspeed_enabled: bool

    @override
    def create_accelerator_and_postprocess(self) -> None:
        with patch("transformers.trainer.Accelerator", ZenFlowAccelerator):
            super().create_accelerator_and_postprocess()

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model has its exact weights afterwards."""
        # The Trainer would go on with the engine of a training before, which has ended.
        self.accelerator.free_memory()
        self.model_wrapped = self.model
        output = super().train(*args, **kwargs)
        if (strategy := self.accelerator.strategy) is not None:
            strategy.flush()
            rank_zero_info(strategy.summary() or "")
        return output

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer refuses to evaluate before a training under stage 2, where a model needs no engine for that.
        before, stage = self.is_deepspeed_enabled, self.accelerator.deepspeed_plugin.zero_stage
        self.is_deepspeed_enabled = before and (self.deepspeed is not None or stage == 3)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.is_deepspeed_enabled = before

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and (strategy := self.accelerator.strategy) is not None:
            metrics, names = strategy.metrics(), [f"zenflow/{name}" for name in _LOGGED]
            logs = {**logs, **{name: metrics[name] for name in names if name in metrics}}
        super().log(logs, *args, **kwargs)

    @override
    def _get_grad_norm(self, model: Module, grad_norm: Tensor | None = None) -> Tensor:
        # Under DeepSpeed the Trainer reads the norm on the host in each step, which waits for the device.
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm


class ZenFlowTrainer(ZenFlowTraining, Trainer):
    """The `Trainer` of transformers with ZeRO's offload that does not wait for the CPU.

    ``from lightning_zenflow.transformers import ZenFlowTrainer as Trainer`` below the other imports is complete; see `ZenFlowTraining`.
    """
