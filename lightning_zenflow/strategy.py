"""The Trainer's strategy: configuration, life cycle, and the hooks at which weights must be exact."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.checkpoints import Checkpoints
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.core.process import one_at_a_time
from lightning_zenflow.deepspeed.config import prepare_deepspeed_config, read_settings, without
from lightning_zenflow.deepspeed.environment import RankProcess, own_precision
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine, inference_engine, leaving_engines
from lightning_zenflow.deepspeed.users_objects import configured, refuse_unsupported_module, refuse_unsupported_trainer
from lightning_zenflow.stall_monitor import StallMonitor
from lightning_zenflow.step_meter import SUMMED_UP
from lightning_zenflow.steps import TrainerPrecision, TrainerSteps, naming_late_reads
from lightning_zenflow.trainer_checkpoints import Saves, TrainerCheckpoints

if TYPE_CHECKING:
    _DeepSpeedStrategy = DeepSpeedStrategy
else:
    _DeepSpeedStrategy = object


# The body of both strategies: `lightning.pytorch` and `pytorch_lightning` have the same classes twice. The subclass for each extends its
# `DeepSpeedStrategy`, too, and has this docstring.
class TrainerStrategy(_DeepSpeedStrategy):
    """Trains with ZeRO-2, or ZeRO-3, and the optimizer states in host memory, without waiting for the CPU.

    ``Trainer(strategy=ZenFlowStrategy(topk_ratio=0.05))`` is complete. The model's `configure_optimizers` stays as it is (AdamW or
    Adam, any number of parameter groups, schedulers); so do `gradient_clip_val`, `accumulate_grad_batches` and checkpoints.
    While gradients are clipped, forward passes see weights with a predicted clip factor unless `clip_prediction` is false.

    Runs on CUDA and, for tests and small models, on the CPU.

    Args:
        config: source of the keys that are not given as keywords: a `ZenFlowConfig`, an OmegaConf YAML file or DictConfig, or a DeepSpeed
            configuration (JSON file or dict) with or without a ``zero_optimization.zenflow`` block.
        topk_ratio: this and all keywords up to `stall_monitor` are keys of `ZenFlowConfig`; None: the value of `config`, else the default.
        stage: of ZeRO. Under stage 2 each rank has all weights, under stage 3 the ranks share them. None takes 2. Beside a DeepSpeed
            configuration this and all other keywords of ZeRO must be absent.
        offload_parameters: whether the weights are in host memory, under stage 3.
        **deepspeed_options: other keywords of `DeepSpeedStrategy`, such as `reduce_bucket_size` or `timeout`.

    Raises:
        ValueError: a key has a value that is not allowed.
        MisconfigurationException: a keyword is unknown; `config` cannot be read, or asks DeepSpeed for what ZenFlow does not support.
    """

    strategy_name = "zenflow"
    # Lightning would read the variable's file again, and as JSON (`read_settings`).
    DEEPSPEED_ENV_VAR = ""
    # An epoch's remaining micro-batches make a step of their own; DeepSpeed would count them into the next epoch.
    handles_gradient_accumulation = False
    # ZeRO reduces the gradients of every micro-batch.
    block_backward_sync = nullcontext  # type: ignore[assignment]  # it is any context
    lightning_restore_optimizer = True
    config: Any  # Lightning's own, which the constructor has prepared
    calls = Calls()
    lightning: ClassVar[ModuleType]
    """The package whose Trainer this strategy is for, as are the next two."""
    stall_monitor: ClassVar[type[StallMonitor]]
    precision_class: ClassVar[type[TrainerPrecision]]

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
        offload_ratio: float | Literal["auto"] | None = None,
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
        deepspeed_options |= without({"stage": stage, "offload_parameters": offload_parameters}, None)
        self._settings = read_settings(
            config,
            deepspeed_options,
            self.lightning.strategies.DeepSpeedStrategy,
            topk_ratio=topk_ratio,
            select_strategy=select_strategy,
            select_interval=select_interval,
            update_interval=update_interval,
            max_update_interval=max_update_interval,
            publish_lag=publish_lag,
            clip_prediction=clip_prediction,
            full_warm_up_rounds=full_warm_up_rounds,
            overlap_step=overlap_step,
            weight_prediction=weight_prediction,
            provisional_scale=provisional_scale,
            offload_ratio=offload_ratio,
            auto_ratio=auto_ratio,
            moments_dtype=moments_dtype,
            offload=offload,
            accumulate_on=accumulate_on,
            worker_cores=worker_cores,
            pt_reserved_cores_perc=pt_reserved_cores_perc,
            worker_timeout=worker_timeout,
            max_worker_restarts=max_worker_restarts,
            checkpoint_format=checkpoint_format,
            sync_checkpoints=sync_checkpoints,
            async_checkpoints=async_checkpoints,
            stall_monitor=stall_monitor,
        )
        super().__init__(config=self._settings.deepspeed, **deepspeed_options)
        self.config = prepare_deepspeed_config(self.config)
        self.zenflow_config = self._settings.zenflow
        self._process, self._checkpoints = RankProcess(), Checkpoints(self.zenflow_config)
        self._requests = TrainerCheckpoints(self, self._checkpoints)
        self._steps: TrainerSteps | None = None
        self._layers = ExitStack()  # ends their synchronisation over ranks

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, without what a training has left, which belongs to this process."""
        new: dict[str, Any] = {"_steps": None, "_layers": ExitStack(), "_process": RankProcess()}
        # Private: Lightning's engine and optimizers, which are DeepSpeed's and ours.
        lightnings: dict[str, Any] = {"_model": self._lightning_module, "_optimizers": [], "_lightning_optimizers": []}
        return {**vars(self), **new, **lightnings}

    @property
    def zenflow_optimizer(self) -> ZenFlowOptimizer | None:
        """The optimizer of the present or last set-up; None before the first."""
        return None if self._checkpoints.trained is None else self._checkpoints.trained.optimizer

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, which has all batches."""
        return self.num_nodes * self.num_processes == 1

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        # Private: `model.trainer` is an error where there is none.
        trainer: Any = model._trainer
        monitors = trainer is not None and self.zenflow_config.stall_monitor
        if monitors and not any(isinstance(callback, StallMonitor) for callback in trainer.callbacks):
            # First: at the end it would be behind the checkpoint callbacks, which Lightning keeps last.
            trainer.callbacks.insert(0, self.stall_monitor(summary_from=SUMMED_UP))

    @DeepSpeedStrategy.precision_plugin.setter  # type: ignore[attr-defined, untyped-decorator]  # mypy sees no property
    def precision_plugin(self, plugin: Any) -> None:
        """Replaces Lightning's plugin by this package's (`own_precision`)."""
        # Private: where a Trainer looks for one that the user gave the strategy.
        self._precision_plugin = own_precision(plugin, self.precision_class)

    @override
    def _configure_launcher(self) -> None:
        # Private: the last call before other ranks are started. One process launches nothing, also in notebooks.
        if self.is_alone:
            return
        # A notebook, or Python's prompt, as Lightning recognises them; its own error advises a strategy that does not offload.
        if hasattr(sys, "ps1") or bool(sys.flags.interactive):
            raise MisconfigurationException(
                "ZenFlowStrategy: in a notebook or at Python's prompt devices must be 1, got"
                f" {self.num_nodes * self.num_processes}: other processes need a file to run; write one (`%%writefile train.py`) and run it"
                " (`!python train.py`)"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # The first hook that sees the model's own callbacks, and before theirs.
        trainer: Any = self._requests.module.trainer
        self._requests.saves = Saves()
        refuse_unsupported_trainer(trainer, self.lightning, in_pieces=self.zero_stage_3)
        if self.is_alone:
            # Private: the Trainer's option. Lightning takes every `DeepSpeedStrategy` for distributed, and asks none for its ranks.
            trainer._accelerator_connector.use_distributed_sampler = False
        self._process.set_up(self, self.lightning.strategies, super().setup_environment, is_alone=self.is_alone)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        with self._requests.saves.undisturbed(), warnings.catch_warnings():
            # A module's `configure_gradient_clipping` does clip here (`TrainerPrecision`).
            warnings.filterwarnings("ignore", "Since DeepSpeed handles gradient clipping internally")
            refuse_unsupported_module(self._requests.module)
            if trainer.state.fn == TrainerFn.FITTING:
                self._requests.check_callbacks(trainer.checkpoint_callbacks, self.lightning, as_file=self._saves_file())
                # Private: of `sync_batchnorm`, or a plugin. Lightning's strategy would never apply it, and revert it on DeepSpeed's engine.
                plugin, self._layer_sync = trainer._accelerator_connector._layer_sync, None
                if plugin is not None and not self.is_alone:
                    self.model = plugin.apply(self._requests.module)
                    self._layers.callback(plugin.revert, self.model)
            self._requests.be_first(trainer, self.lightning)
            super().setup(trainer)

    @override
    def _format_config(self) -> None:
        # Private: between the Trainer's values, which it reads, and the engine's construction.
        if self.lightning_module is not None:
            precision = self.precision_plugin.precision
            self.config = self._settings.config_under(self.config, self.lightning_module.trainer, precision)
        super()._format_config()

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        # Private: DeepSpeed replaces the optimizer afterwards.
        optimizer, schedulers = configured(self._requests.module, self.lightning, in_config="scheduler" in self.config)
        self.lr_scheduler_configs = schedulers  # Lightning steps all of them; DeepSpeed has a place for one
        return optimizer, schedulers[0] if len(schedulers) == 1 else None

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self._checkpoints.trained is not None and not self._checkpoints.trained.training.closed:
            raise MisconfigurationException(
                "setup_optimizers must not be called in training: change `optimizer.param_groups`, or call `fit` with the checkpoint"
            )
        super().setup_optimizers(trainer)

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        # What a training before has left is as large as what this one needs.
        self._checkpoints.end(together=True)
        self.optimizers = []
        self._checkpoints.trained = self._steps = None
        trained = TrainedEngine(model, optimizer, self, self._settings, self.calls, lr_scheduler)
        self.zenflow_config = trained.zenflow
        self._checkpoints.begin(trained, self)
        is_overridden = self.lightning.utilities.model_helpers.is_overridden
        clips_itself = is_overridden("configure_gradient_clipping", self.lightning_module)
        self._steps = TrainerSteps(trained, self._requests.module, self.precision_plugin, clips_itself=clips_itself)
        return trained.engine, trained.optimizer

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        # Private: the engine of a model that is evaluated. Lightning's own method removes all hooks of the model, the user's as well.
        self.model = inference_engine(model, self.config, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        call = partial(super().training_step, *args, **kwargs)
        return call() if self._steps is None else self._steps.training_step(call)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        call, trained = partial(super().validation_step, *args, **kwargs), self._checkpoints.trained
        return call() if trained is None else trained.training.run_forward(call)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is not None:
            self._steps.begin_backward()
        with naming_late_reads():
            # DeepSpeed would divide by the number of micro-batches, which Lightning has done.
            return super().backward(*args, scale_wrt_gas=False, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext(closure) if self._steps is None else self._steps.step(closure) as whole:
            return super().optimizer_step(optimizer, whole, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._requests.saves.in_batch = True
        if self._steps is not None:
            self._steps.begin_batch()
        super().on_train_batch_start(batch, batch_idx)

    @override
    @one_at_a_time()
    def teardown(self) -> None:
        """Ends the worker, releases the shared memory, and makes the module what it was before, with its weights as they are now."""
        trained = self._checkpoints.trained
        if trained is not None and trained.training.is_elsewhere:
            return
        models = [] if self.model is None else [self.model]
        together = self._requests.module.trainer.state.status != TrainerStatus.INTERRUPTED
        with self._requests.saves.undisturbed(), ExitStack() as last:
            last.callback(self._checkpoints.end, together=together)
            with leaving_engines(models, trained, ranks_on_host=self.num_processes, together=together):
                self._layers.close()
                super().teardown()
                self._process.end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Called after the callbacks' own.
        try:
            self._requests.saves.end_batch()
        finally:
            self._requests.saves.over = True
        super().on_exception(exception)

    def flush(self) -> None:
        """Makes weights and optimizer states exact, between two steps; raises errors of saves. All ranks call it together."""
        self._requests.flush()

    def give_back(self) -> None:
        """Gives the device memory of optimizer states (`offload_ratio`) back for good, between two steps. All ranks call it together."""
        if self._checkpoints.trained is not None:
            self._checkpoints.trained.training.give_back()

    def wait_for_checkpoint(self) -> None:
        """Waits for the checkpoint that is written in the background; raises its OSError on all ranks, which call it together."""
        self._checkpoints.wait()

    def _saves_file(self, *, weights_only: bool = False) -> bool:
        return weights_only or self._checkpoints.is_one_file(world_size=self.world_size)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._requests.state_dict(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # Lightning asks before `save_checkpoint`, which saves the state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        as_file = self._saves_file(weights_only="optimizer_states" not in checkpoint)
        self._requests.save(checkpoint, filepath, storage_options, as_file=as_file)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._requests.load(checkpoint_path, weights_only=bool(weights_only))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._requests.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._requests.load_optimizer(checkpoint)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._requests.remove(filepath)


class ZenFlowPrecision(TrainerPrecision, DeepSpeedPrecision):
    """`TrainerPrecision` for the Trainer of `lightning.pytorch`."""


class ZenFlowStrategy(TrainerStrategy, DeepSpeedStrategy):  # noqa: D101
    __doc__ = TrainerStrategy.__doc__

    precision_class = ZenFlowPrecision
    lightning: ClassVar[ModuleType] = pl
    stall_monitor = StallMonitor
