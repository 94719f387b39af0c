"""The Lightning strategy: configuration, life cycle, and the hooks at which weights must be exact."""

import math
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.saves import Saves
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import one_at_a_time
from lightning_zenflow.deepspeed.config import prepare_deepspeed_config
from lightning_zenflow.deepspeed.environment import TrainerPrecision, inference_engine
from lightning_zenflow.deepspeed.users_objects import (
    own_precision,
    refuse_unsupported_callbacks,
    refuse_unsupported_module,
    validate_optimizer,
)
from lightning_zenflow.monitor.callbacks import StallMonitor, StallMonitoring
from lightning_zenflow.trainer_checkpoints import TrainerCheckpoints


# A mixin of a Trainer's `DeepSpeedStrategy`. `lightning.pytorch` and `pytorch_lightning` have the same classes twice; a subclass for each
# names those that are its own, and has this docstring.
class TrainerStrategy(TrainerCheckpoints):
    """Trains with ZeRO-2, or ZeRO-3, and the optimizer states in host memory, without waiting for the CPU.

    ``Trainer(strategy=ZenFlowStrategy(topk_ratio=0.05))`` is complete. The model's `configure_optimizers` stays as it is (AdamW or
    Adam, any number of parameter groups, schedulers); so do `gradient_clip_val`, `accumulate_grad_batches` and checkpoints.
    While gradients are clipped, forward passes see weights with a predicted clip factor unless `clip_prediction` is false.

    Runs on CUDA and, for tests and small models, on the CPU.

    Args:
        config: source of the keys that are not given as keywords: a `ZenFlowConfig`, an OmegaConf YAML file or DictConfig, or a DeepSpeed
            configuration (JSON file or dict) with or without a ``zero_optimization.zenflow`` block.
        topk_ratio: this and all keywords up to `stall_monitor` are the keys of `ZenFlowConfig`; None takes the value of `config`, else the
            default.
        stage: of ZeRO. Under stage 2 each rank has all weights, under stage 3 the ranks share them. None takes 2. Beside a DeepSpeed
            configuration this and all other keywords of ZeRO must be absent.
        offload_parameters: whether the weights are in host memory, under stage 3.
        **deepspeed_options: other keywords of `DeepSpeedStrategy`, such as `reduce_bucket_size` or `timeout`.

    Raises:
        ValueError: a key has a value that is not allowed.
        MisconfigurationException: a keyword is unknown; `config` cannot be read, or asks DeepSpeed for what ZenFlow does not support.
    """

    strategy_name = "zenflow"
    lightning: ClassVar[ModuleType]
    """The package whose Trainer it is for."""
    stall_monitor: ClassVar[type[StallMonitoring]]
    """The callback for that Trainer."""
    precision_class: ClassVar[type[TrainerPrecision]]
    """The plugin for that Trainer."""
    _layer_sync: Any  # Lightning's own, declared for the type checker

    def __init__(
        self,
        config: ZenFlowConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        topk_ratio: float | None = None,
        select_strategy: Literal["step", "epoch", "auto"] | None = None,
        select_interval: int | Literal["auto"] | None = None,
        update_interval: int | Literal["auto"] | None = None,
        max_update_interval: int | None = None,
        publish_lag: int | Literal["auto"] | None = None,
        clip_prediction: bool | Literal["auto"] | None = None,
        full_warm_up_rounds: int | None = None,
        overlap_step: bool | None = None,
        weight_prediction: float | Literal["auto"] | None = None,
        provisional_scale: float | Literal["auto"] | None = None,
        auto_ratio: float | None = None,
        moments_dtype: Literal["float32", "bfloat16", "int8"] | None = None,
        offload: bool | None = None,
        accumulate_on: Literal["auto", "device", "host"] | None = None,
        worker_cores: int | Sequence[int] | Literal["auto"] | None = None,
        pt_reserved_cores_perc: float | Literal["auto"] | None = None,
        worker_timeout: float | None = None,
        max_worker_restarts: int | None = None,
        checkpoint_format: Literal["auto", "deepspeed", "lightning"] | None = None,
        sync_checkpoints: bool | None = None,
        async_checkpoints: bool | None = None,
        stall_monitor: bool | None = None,
        stage: Literal[2, 3] | None = None,
        offload_parameters: bool | None = None,
        **deepspeed_options: Any,
    ) -> None:
        keys = {
            "topk_ratio": topk_ratio,
            "select_strategy": select_strategy,
            "select_interval": select_interval,
            "update_interval": update_interval,
            "max_update_interval": max_update_interval,
            "publish_lag": publish_lag,
            "clip_prediction": clip_prediction,
            "full_warm_up_rounds": full_warm_up_rounds,
            "overlap_step": overlap_step,
            "weight_prediction": weight_prediction,
            "provisional_scale": provisional_scale,
            "auto_ratio": auto_ratio,
            "moments_dtype": moments_dtype,
            "offload": offload,
            "accumulate_on": accumulate_on,
            "worker_cores": worker_cores,
            "pt_reserved_cores_perc": pt_reserved_cores_perc,
            "worker_timeout": worker_timeout,
            "max_worker_restarts": max_worker_restarts,
            "checkpoint_format": checkpoint_format,
            "sync_checkpoints": sync_checkpoints,
            "async_checkpoints": async_checkpoints,
            "stall_monitor": stall_monitor,
        }
        place = {"stage": stage, "offload_parameters": offload_parameters}
        deepspeed_options |= {key: value for key, value in place.items() if value is not None}
        super().__init__(config, keys, deepspeed_options)
        self._n_in_closure = 0  # backward passes in the present closure of `optimizer.step`

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: configuration and module. What a training has left, DeepSpeed's and the arena, belongs to this process."""
        nothing: dict[str, Any] = dict.fromkeys(
            ("zenflow_optimizer", "_users_optimizer", "_trained", "_file", "_background")
        )
        # Private: Lightning's engine and optimizers, which are DeepSpeed's and ours.
        emptied = {name: list[Any]() for name in ("_released", "_optimizers", "_lightning_optimizers")}
        anew = {"_model": self._lightning_module, "_ending": ExitStack(), "_saves": Saves()}
        return {**vars(self), **nothing, **emptied, **anew}

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        # Private: `model.trainer` is an error where there is none.
        if model._trainer is not None:
            callbacks: list[pl.Callback] = model.trainer.callbacks  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
            # A monitor of the user's own is kept instead.
            if self.zenflow_config.stall_monitor and not any(isinstance(c, StallMonitoring) for c in callbacks):
                # First: at the end it would be behind the checkpoint callbacks, which Lightning keeps last.
                callbacks.insert(0, self.stall_monitor(summary_from=50))

    @property
    @override
    def precision_plugin(self) -> Any:
        """The Trainer's precision, as this package has it."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # Private: where a Trainer looks for one that the user gave the strategy.
        self._precision_plugin = own_precision(plugin, self.precision_class)

    @override
    def _configure_launcher(self) -> None:
        # Private: the last call before other ranks are started. Lightning recognises a notebook or Python's prompt so, too.
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if is_interactive and not self.is_alone:
            # Lightning's own error advises a strategy that does not offload.
            raise MisconfigurationException(
                f"ZenFlowStrategy: in a notebook or at Python's prompt devices must be 1, got {self.num_nodes * self.num_processes}: other"
                " processes need a file to run; write one (`%%writefile train.py`) and run it (`!python train.py`)"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # The first hook that sees the model's own callbacks, and before theirs.
        trainer = self.lightning_module.trainer
        self._saves = Saves()
        refuse_unsupported_callbacks(trainer.callbacks, self.lightning, in_pieces=self.zero_stage_3)
        if self.is_alone:
            # Private: the Trainer's option. Lightning takes every `DeepSpeedStrategy` for distributed, and asks none for its ranks.
            trainer._accelerator_connector.use_distributed_sampler = False
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        with self._saves.undisturbed():
            refuse_unsupported_module(self.lightning_module)
            if (algorithm := trainer.gradient_clip_algorithm) not in (None, "norm"):
                raise MisconfigurationException(
                    f"ZenFlowStrategy: gradient_clip_algorithm must be 'norm', got {str(algorithm.value)!r}, which is not implemented"
                )
            if trainer.state.fn == TrainerFn.FITTING:
                self._check_checkpoint_callbacks(trainer.checkpoint_callbacks)
                # Private: of `sync_batchnorm`, or a plugin. Lightning's strategy would never apply it, and revert it on DeepSpeed's engine.
                plugin, self._layer_sync = trainer._accelerator_connector._layer_sync, None
                if plugin is not None and not self.is_alone:
                    self.model = plugin.apply(self.model)
                    self._ending.callback(plugin.revert, self.model)
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not see it
            if self._exact_weights not in callbacks:
                callbacks.insert(0, self._exact_weights)
            super().setup(trainer)

    @override
    def _format_config(self) -> None:
        # Private: between the Trainer's values, which it reads, and the engine's construction.
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self.config = prepare_deepspeed_config(
                self.config,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                gradient_clip_val=trainer.gradient_clip_val,
                precision=self.precision_plugin.precision,
            )
            users = self._users_config
            if users is not None and users.get("gradient_clipping") is None and trainer.gradient_clip_val is None:
                rank_zero_info(
                    "ZenFlowStrategy does not clip, as nothing sets a norm. Plain DeepSpeed since 0.19.3 clips by a norm of 1.0 then:"
                    " set gradient_clipping to 1.0 for the same, to 0 for none"
                )
        super()._format_config()

    @override
    def _auto_select_batch_size(self) -> int:
        # Private. DeepSpeed's throughput log alone reads it. Lightning asks for the training data once more, which not all loaders have.
        return 1

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        # Private: calls the user's method; DeepSpeed replaces its result afterwards.
        made = self.lightning.core.optimizer
        several = "configure_optimizers must return one optimizer, got several (use its groups), or schedulers beside a DeepSpeed config's"
        try:
            optimizers, schedulers = made._init_optimizers_and_lr_schedulers(self.lightning_module)
        except Exception as error:
            if "multiple optimizers" not in str(error):  # in automatic optimization
                raise
            raise MisconfigurationException(several) from error
        optimizer, *others = optimizers
        if others or (len(schedulers) > 1 and "scheduler" in self.config):
            raise MisconfigurationException(several)
        if isinstance(optimizer, made._MockOptimizer):  # private: what Lightning puts in the place of None
            raise MisconfigurationException(
                "configure_optimizers must return an optimizer, got None; use `Trainer(strategy='auto')`, or `validate`, `test`, `predict`"
            )
        validate_optimizer(optimizer, self.lightning_module)
        self.lr_scheduler_configs = schedulers  # Lightning steps all of them; DeepSpeed has a place for one
        return optimizer, schedulers[0] if len(schedulers) == 1 else None

    @override
    @one_at_a_time()
    def init_deepspeed(self) -> None:
        with warnings.catch_warnings():
            # A module's `configure_gradient_clipping` does clip here (`TrainerPrecision`).
            warnings.filterwarnings("ignore", "Since DeepSpeed handles gradient clipping internally")
            super().init_deepspeed()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self.zenflow_optimizer is not None and not self.zenflow_optimizer.training.closed:
            raise MisconfigurationException(
                "setup_optimizers must not be called in training: change `optimizer.param_groups`, or call `fit` with the checkpoint"
            )
        super().setup_optimizers(trainer)

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        # Those of a fit before, which would keep its state in memory.
        self.optimizers: list[Optimizer] = []
        # Private: calls `deepspeed.initialize`, during which ZenFlow's optimizer takes the place of DeepSpeed's.
        initialize = partial(super()._setup_model_and_optimizer, model, optimizer, lr_scheduler)
        engine: tuple[Any, Optimizer] = self._set_up(initialize, model, optimizer)
        assert self.zenflow_optimizer is not None
        overridden: Callable[..., bool] = self.lightning.utilities.model_helpers.is_overridden
        plugin, clip_val = self.precision_plugin, self.lightning_module.trainer.gradient_clip_val
        if clip_val is None and isinstance(plugin, TrainerPrecision):
            plugin.max_norm = self.zenflow_optimizer.clip_grad
        self._clips_itself = overridden("configure_gradient_clipping", self.lightning_module)
        return engine

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        # Private: the engine of a model that is evaluated. Lightning's own method removes all hooks of the model, the user's as well.
        self.model = inference_engine(model, self.config, self.root_device)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning decides which micro-batch is a step's last, so that an epoch's remaining micro-batches make a step of their own.

        DeepSpeed would count them into the next epoch; Lightning's step counter and schedulers do not.
        """
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """No effect: ZeRO reduces the gradients of every micro-batch, because each rank keeps its part only."""
        yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = super().training_step(*args, **kwargs)
        # Lightning's DeepSpeed plugin checks only the last micro-batch of a step.
        if output is None and self.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                "ZenFlowStrategy: training_step must return a loss, got None, which would block the other ranks: to skip a batch,"
                " return any output times zero"
            )
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward pass of a micro-batch, by the Trainer or by `manual_backward`.

        The last one of a step is that in the closure of `optimizer_step`, if the closure before had one only. Elsewhere only the call of
        `optimizer_step`, or the closure's end, tells that there are no more, and the step's updates begin behind it.
        """
        self._n_in_closure += 1
        plugin, optimizer = self.precision_plugin, self.zenflow_optimizer
        if isinstance(plugin, TrainerPrecision) and optimizer is not None:
            if optimizer.training.steps.micro_batches == 0:
                plugin.norm_of_step = None
            is_over = optimizer.training.steps.is_complete and not self.lightning_module.automatic_optimization
            if is_over or plugin.norm_of_step is not None:
                raise MisconfigurationException(
                    "ZenFlowStrategy: a step must have no backward pass behind `clip_gradients`, and no second one in the closure of"
                    " `optimizer.step` where the closure before had one only; call `manual_backward` for the others before `optimizer.step`"
                )
        return super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the step's last micro-batches (forward and backward are in its closure, if there is one) and the step."""
        planner = None if self.zenflow_optimizer is None else self.zenflow_optimizer.training.parts.planner
        set_boundary = self.deepspeed_engine.set_gradient_accumulation_boundary
        is_automatic = self.lightning_module.automatic_optimization
        set_boundary(is_automatic or (planner is not None and planner.has_single_backward))
        self._n_in_closure = 0

        def complete() -> Any:
            output = closure()
            # A step without a closure says nothing about later ones, nor does one of automatic optimization.
            if self._n_in_closure and planner is not None and not is_automatic:
                planner.has_single_backward = self._n_in_closure == 1
            set_boundary(True)
            return output

        output = super().optimizer_step(optimizer, complete, *args, **kwargs)
        set_boundary(False)  # in manual optimization another step may begin in the same batch
        return output

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        self._saves.in_batch = True
        plugin, optimizer, trainer = self.precision_plugin, self.zenflow_optimizer, self.lightning_module.trainer
        is_automatic = self.lightning_module.automatic_optimization
        if isinstance(plugin, TrainerPrecision) and optimizer is not None and is_automatic:
            # What the backward pass predicts clip factors from; in manual optimization the norm that was given last.
            given = optimizer.clip_grad or math.inf if self._clips_itself else trainer.gradient_clip_val
            optimizer.clip_grad = given or plugin.max_norm
        self._begin_micro_batch()
        self.start_epoch(trainer.current_epoch)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def _in_engines(self) -> Sequence[Module]:
        return [] if self.model is None else [self.model]

    @property
    @override
    def _ends_together(self) -> bool:
        return bool(self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED)


class ZenFlowPrecision(TrainerPrecision, DeepSpeedPrecision):  # type: ignore[misc]  # nor do Lightning's agree
    """`TrainerPrecision`, which says all of it, for the Trainer of `lightning.pytorch`."""


class ZenFlowStrategy(TrainerStrategy, DeepSpeedStrategy):  # noqa: D101
    __doc__ = TrainerStrategy.__doc__

    precision_class = ZenFlowPrecision
    deepspeed_strategy = DeepSpeedStrategy
    lightning: ClassVar[ModuleType] = pl
    stall_monitor = StallMonitor
