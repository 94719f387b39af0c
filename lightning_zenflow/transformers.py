"""The `Trainer` of Hugging Face's transformers, and those that extend it, with the optimizer of this package.

Written against transformers 5.23: its module `trainer` names the accelerator's class, and methods with a leading underscore are private.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DummyScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_optim_sched
from typing_extensions import override

from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.users_objects import NEW_MOMENTS

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    # Any Trainer that is the class behind it.
    _Trainer = object

_LOGGED = ("stall/device_percent", "stall/host_percent", "overlap/worker_busy_percent", "overlap/late_blocks_percent")


class _Accelerator(ZenFlowAccelerator):
    calls = ZenFlowAccelerator.calls._replace(
        front="ZenFlowTrainer",
        clip="TrainingArguments(max_grad_norm=...)",
        accumulate="set `TrainingArguments(gradient_accumulation_steps=...)`",
        read="in `on_pre_optimizer_step` of a callback",
        write="in `on_step_begin` or `on_step_end` of a callback",
    )


class ZenFlowTraining(_Trainer):
    """Mixin of a `Trainer`, before it in the bases: ``class ZenFlowSFTTrainer(ZenFlowTraining, SFTTrainer): ...``.

    Keys of ZenFlow are those of the block ``zero_optimization.zenflow`` of `TrainingArguments.deepspeed`, as DeepSpeed's own ZenFlow reads
    them; without a DeepSpeed configuration all have their defaults. Checkpoints are those of the Trainer under DeepSpeed.

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
    is_deepspeed_enabled: bool

    @override
    def create_accelerator_and_postprocess(self) -> None:
        args, model_alone = self.args, self.args.save_only_model and self.args.load_best_model_at_end
        for kind in ("bf16", "fp16"):
            if getattr(args, f"{kind}_full_eval") and not getattr(args, kind):
                raise MisconfigurationException(
                    f"ZenFlowTrainer: {kind}_full_eval must be False where {kind} is, got True: DeepSpeed would train in 16 bits, too"
                )
        with (
            patch("transformers.trainer.Accelerator", partial(_Accelerator, **self.zenflow)),
            # Refused there in DeepSpeed's name, and stage 2 saves whole models.
            patch.object(args, "load_best_model_at_end", args.load_best_model_at_end and not model_alone),
        ):
            super().create_accelerator_and_postprocess()
        if model_alone and self.accelerator.deepspeed_plugin.zero_stage == 3:
            raise MisconfigurationException(
                "ZenFlowTrainer: save_only_model must be False with load_best_model_at_end under stage 3, got True: no rank has the whole"
                " model to load it to"
            )
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        # TRL has DeepSpeed build the engine of a reference model with this configuration.
        config.setdefault("train_micro_batch_size_per_gpu", self.args.per_device_train_batch_size)
        # Accelerate warns of a difference, and the Trainer has told it 1.
        self.accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        # Private: as the Trainer sets it for a model that is not replicated. A process has one device.
        self.args._n_gpu = 1

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model has its exact weights afterwards."""
        # The Trainer would go on with the engine of a training before, which has ended.
        self.accelerator.free_memory()
        self.model_wrapped = self.model
        output = super().train(*args, **kwargs)
        if (strategy := self.accelerator.strategy) is not None:
            strategy.flush()
            strategy.log_summary()
        return output

    @override
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        set_up = partial(_keep_given, self.optimizer)
        # Private: what `deepspeed_init` calls, which drops both.
        with patch("transformers.integrations.deepspeed.deepspeed_optim_sched", set_up):
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (strategy := self.accelerator.strategy) is not None:
            strategy.start_epoch(int(self.state.epoch or 0))
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
    def _load_best_model(self) -> None:
        if self.accelerator.strategy is not None:
            self.accelerator.strategy.flush()
        with patch.object(self, "is_deepspeed_enabled", not self.args.save_only_model):
            super()._load_best_model()

    @override
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if (optimizer := self.deepspeed.optimizer).training.steps.has_gradients:
            # `TrainingArguments.enable_jit_checkpoint` saves between backward and step, behind which the Trainer looks at this.
            self.control.should_save = True
        else:
            optimizer.flush()
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


_KINDS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Names in transformers of DeepSpeed's schedulers."""


def _keep_given(optimizer: Any, trainer: Any, config: Any, args: TrainingArguments, steps: int, *rest: Any) -> Any:
    """`deepspeed_optim_sched` of transformers, which keeps the Trainer's optimizer and scheduler, and refuses blocks of DeepSpeed's
    configuration in their place. `optimizer` is the Trainer's before the set-up: the user's, that of a training before, or None.
    """
    blocks, scheduler = config.config, trainer.lr_scheduler
    if isinstance(scheduler, AcceleratedScheduler | DummyScheduler):
        scheduler = None
    if has_trained := isinstance(optimizer, AcceleratedOptimizer):
        has_steps, optimizer = optimizer.optimizer.training.steps.number > 0, optimizer.optimizer.users.given
    params = {block: blocks[block].setdefault("params", {}) for block in ("optimizer", "scheduler") if block in blocks}
    kind, optimizers = blocks.get("scheduler", {}).get("type"), "Trainer(optimizers=...)"
    for block, name, is_given in (
        ("optimizer", optimizers, (isinstance(optimizer, Optimizer) and not has_trained) or scheduler is not None),
        ("optimizer", "Trainer(optimizer_cls_and_kwargs=...)", trainer.optimizer_cls_and_kwargs is not None),
        ("optimizer", f"TrainingArguments(optim={args.optim})", args.optim not in ("adamw_torch", "adamw_torch_fused")),
        ("scheduler", optimizers, scheduler is not None),
        (
            "scheduler",
            "TrainingArguments(lr_scheduler_type=...)",
            args.lr_scheduler_type not in ("linear", _KINDS.get(kind)),
        ),
        ("scheduler", "TrainingArguments(lr_scheduler_kwargs=...)", bool(args.lr_scheduler_kwargs)),
    ):
        if is_given and block in blocks:
            raise MisconfigurationException(
                f"ZenFlowTrainer: {name} must be absent where DeepSpeed's configuration has a block `{block}`: leave the block out"
            )
    # transformers has compared what a block says with the arguments, and leaves what it does not say to DeepSpeed's defaults.
    if "optimizer" in blocks:
        betas = [args.adam_beta1, args.adam_beta2]
        adam = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay}
        params["optimizer"].update(adam)
        if has_trained and has_steps:
            rank_zero_warn(NEW_MOMENTS)
    if kind in _KINDS:
        params["scheduler"].setdefault("warmup_num_steps", max(1, args.get_warmup_steps(steps)))
        if kind != "WarmupCosineLR":
            params["scheduler"].setdefault("warmup_max_lr", args.learning_rate)
    trainer.optimizer = optimizer
    prepared, of_blocks = deepspeed_optim_sched(trainer, config, args, steps, *rest)  # type: ignore[no-untyped-call]
    return prepared, scheduler if of_blocks is None else of_blocks


class ZenFlowTrainer(ZenFlowTraining, Trainer):
    """The `Trainer` of transformers with ZeRO's offload that does not wait for the CPU.

    ``from lightning_zenflow.transformers import ZenFlowTrainer as Trainer`` below the other imports is complete; see `ZenFlowTraining`.
    """
