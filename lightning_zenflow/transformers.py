"""The `Trainer` of Hugging Face's transformers, and those that extend it, where weights are late or parameters in host memory.

Written against transformers 5.23: its module `trainer` names the accelerator's class, and methods with a leading underscore are private.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.nn import Module
from torch.optim import AdamW, Optimizer
from transformers import Trainer
from typing_extensions import override

from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.core.errors import MisconfigurationException

_LOGGED = ("stall/device_percent", "stall/host_percent", "overlap/worker_busy_percent", "overlap/late_blocks_percent")
_OF_BLOCK = {"lr", "betas", "eps", "weight_decay", "torch_adam"}


class _Accelerator(ZenFlowAccelerator):
    calls = ZenFlowAccelerator.calls._replace(
        front="ZenFlowTrainer",
        clip="TrainingArguments(max_grad_norm=...)",
        accumulate="set `TrainingArguments(gradient_accumulation_steps=...)`",
        read="in `on_pre_optimizer_step` of a callback",
        write="in `on_step_begin` or `on_step_end` of a callback",
    )


class ZenFlowTraining(Trainer):
    """Mixin of a `Trainer`, before it in the bases: ``class ZenFlowSFTTrainer(ZenFlowTraining, SFTTrainer): ...``. It is for late weights
    and for parameters in host memory; else the Trainer itself takes ``optimizers=(OffloadAdamW(...), None)``.

    Keys of ZenFlow are those of the block ``zero_optimization.zenflow`` of `TrainingArguments.deepspeed`, as DeepSpeed's own ZenFlow reads
    them; without a DeepSpeed configuration all have their defaults. Optimizer and scheduler are the Trainer's, as without DeepSpeed.
    Checkpoints are those of the Trainer under DeepSpeed.

    Beside the training's loss the Trainer logs the share of the time in which the device and this thread wait for the CPU, how busy the
    worker is, and the share of the blocks that are late, by the names of docs/tuning.md. `accelerator.strategy.metrics()` has all.
    """

    zenflow: ClassVar[Mapping[str, Any]] = {}
    """Keys that go before those of the block. Under stage 3 with `from_pretrained`, and with TRL's reference models, all must be here:
    DeepSpeed reads the block itself then, and does not know all keys.
    """
    accelerator: ZenFlowAccelerator
    # The Trainer's own.
    model_wrapped: Any
    deepspeed: Any

    @override
    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        for kind in ("bf16", "fp16"):
            if getattr(args, f"{kind}_full_eval") and not getattr(args, kind):
                raise MisconfigurationException(
                    f"ZenFlowTrainer: {kind}_full_eval must be False where {kind} is, got True: DeepSpeed would train in 16 bits, too"
                )
        with patch("transformers.trainer.Accelerator", partial(_Accelerator, **self.zenflow)):
            super().create_accelerator_and_postprocess()
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        if "scheduler" in config:
            raise MisconfigurationException(
                "ZenFlowTrainer: DeepSpeed's configuration must have no block `scheduler`: set it by"
                " `TrainingArguments(lr_scheduler_type=..., warmup_steps=...)`"
            )
        # TRL has DeepSpeed build the engine of a reference model with this configuration.
        config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
        # Accelerate warns of a difference, and the Trainer has told it 1.
        self.accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        # Private: as the Trainer sets it for a model that is not replicated. A process has one device.
        args._n_gpu = 1

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model has its exact weights afterwards."""
        # The Trainer would go on with the engine of a training before, which has ended.
        self.accelerator.free_memory()
        self.model_wrapped = self.model
        if isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer = self.optimizer.optimizer.users.given
        output = super().train(*args, **kwargs)
        if (strategy := self.accelerator.strategy) is not None:
            strategy.flush()
            self.accelerator.log_summary()
        return output

    @override
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Private: what drops the optimizer and the scheduler.
        with patch("transformers.trainer.deepspeed_init", _set_up):
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.start().start_epoch(int(self.state.epoch or 0))
        return super().training_step(*args, **kwargs)

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # A model may be in parts of another, as PEFT's are when they generate.
        self.accelerator.start().flush()
        # The Trainer refuses to evaluate without a training under stage 2, where a model needs no engine for that.
        stage, wrapped = self.accelerator.deepspeed_plugin.zero_stage, self.accelerator.deepspeed_engine_wrapped
        with patch.object(self, "is_deepspeed_enabled", wrapped is not None or stage == 3):
            return super().evaluation_loop(*args, **kwargs)

    @override
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.deepspeed.optimizer.training.steps.has_gradients:
            # `TrainingArguments.enable_jit_checkpoint` saves between backward and step, behind which the Trainer looks at this.
            self.control.should_save = True
        else:
            super()._save_checkpoint(*args, **kwargs)

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


def _set_up(trainer: Any, num_training_steps: int) -> tuple[Optimizer | None, Any]:
    """In the place of `deepspeed_init` of transformers, which drops both: the Trainer's optimizer and scheduler, or None, for which the
    Trainer makes them. A block `optimizer` of DeepSpeed's configuration becomes torch's AdamW.
    """
    args, config = trainer.args, trainer.accelerator.deepspeed_plugin.hf_ds_config
    # Compares what the configuration says with the arguments.
    config.trainer_config_finalize(args, trainer.model, num_training_steps)
    block = config.config.pop("optimizer", None)
    if block is not None:
        is_plain = block.get("type") == "AdamW" and block.get("params", {}).keys() <= _OF_BLOCK
        given = trainer.optimizer or trainer.optimizer_cls_and_kwargs
        if given or not is_plain or args.optim not in ("adamw_torch", "adamw_torch_fused"):
            raise MisconfigurationException(
                "ZenFlowTrainer: a block `optimizer` of DeepSpeed's configuration must be AdamW's, of lr, betas, eps and weight_decay,"
                f" without an optimizer that the Trainer is given, got {block}: leave it out"
            )
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        betas, eps = (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        # Unlike the Trainer's, DeepSpeed's decays all of them.
        trainer.optimizer = AdamW(trained, lr=args.learning_rate, betas=betas, eps=eps, weight_decay=args.weight_decay)
    return trainer.optimizer, trainer.lr_scheduler


class ZenFlowTrainer(ZenFlowTraining):
    """The `Trainer` of transformers with ZeRO's offload that does not wait for the CPU.

    ``from lightning_zenflow.transformers import ZenFlowTrainer as Trainer`` below the other imports is complete; see `ZenFlowTraining`.
    """
