"""Hugging Face's Accelerate, where weights are late or parameters in host memory: engine and steps are those of Fabric's strategy; loaders,
schedulers and checkpoints Accelerate's. Where nothing is, `OffloadAdamW` needs none of this.

Written against Accelerate 1.15. `_prepare_deepspeed` is private, and so are the names that are replaced in it.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, DummyOptim
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.fabric.plugins import DeepSpeedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.engine import ZenFlowEngine
from lightning_zenflow.config import KEYS, ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import world_size
from lightning_zenflow.deepspeed.config import prepare_deepspeed_config, resolve_config, without
from lightning_zenflow.deepspeed.environment import use_cpu_accelerator
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.fabric import OF_THE_LOOP, ZenFlowStrategy

_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
_OF_LIGHTNING = ("checkpoint_format", "sync_checkpoints", "async_checkpoints", "stall_monitor")


class ZenFlowAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no type information
    """Trains with ZeRO-2, or ZeRO-3, and the optimizer states in host memory, without waiting for the CPU.

    ``accelerator = ZenFlowAccelerator(topk_ratio=0.05)`` is complete; the loop stays as it is::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    As under torch, and other than under Accelerate with DeepSpeed, the step is in `optimizer.step`, and `clip_grad_norm_` clips by the norm
    that it is given. Weights are exact in evaluation mode, in `state_dict` and in everything that Accelerate saves.

    Args:
        deepspeed_plugin: has ZeRO's stage and, in a block ``zero_optimization.zenflow``, keys of `ZenFlowConfig`. None: that of
            ``accelerate launch``, else stage 2.
        **options: keys of `ZenFlowConfig`, which go before those of the plugin, and keywords of `Accelerator`.

    Attributes:
        strategy: Fabric's, with `flush`, `metrics` and `summary` as under Fabric.

    Raises:
        ValueError: a key has a value that is not allowed.
        MisconfigurationException: an option asks for what ZenFlow does not support here.
    """

    calls = ZenFlowStrategy.calls._replace(
        setup="model, optimizer = accelerator.prepare(model, optimizer)",
        backward="accelerator.backward",
        clip="accelerator.clip_grad_norm_",
        accumulate="run the micro-batches of a step under `accelerator.accumulate(model)`",
        front="ZenFlowAccelerator",
        read="behind `accelerator.backward`",
    )
    state: AcceleratorState

    def __init__(
        self, deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None, **options: Any
    ) -> None:
        self._keys = {key: options.pop(key) for key in KEYS if key in options}
        ZenFlowConfig(**self._keys)
        # Accelerate sets it for the process, and a plain Trainer in it would train by DeepSpeed, too.
        of_launcher = os.environ.get(_VARIABLE)
        has_plugin = (of_launcher or "false").lower() == "true"
        has_plugin |= "deepspeed_plugins" in options or bool(AcceleratorState._shared_state)
        if deepspeed_plugin is None and not has_plugin:
            zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
            config = {"gradient_accumulation_steps": "auto", "zero_optimization": zero}
            deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=config)
        if options.pop("cpu", False) and torch.cuda.is_available():
            raise MisconfigurationException(
                "ZenFlowAccelerator: cpu must be False where there is a GPU, got True: hide the GPU, with CUDA_VISIBLE_DEVICES=''"
            )
        if "LOCAL_RANK" in os.environ and not torch.cuda.is_available() and not PartialState._shared_state:
            use_cpu_accelerator()
            handlers = options.get("kwargs_handlers") or []
            if not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
                # On CPUs Accelerate knows of several ranks only if it is told their backend.
                options["kwargs_handlers"] = [*handlers, InitProcessGroupKwargs(backend="gloo")]
        try:
            super().__init__(deepspeed_plugin=deepspeed_plugin, **options)
        finally:
            os.environ.pop(_VARIABLE, None)
            os.environ.update({} if of_launcher is None else {_VARIABLE: of_launcher})
        self.strategy: ZenFlowStrategy | None = None
        self._said: str | None = None
        if self.distributed_type != DistributedType.DEEPSPEED:
            raise MisconfigurationException(
                "ZenFlowAccelerator: no other Accelerator must have been made before in this process, got one without DeepSpeed: call"
                " `AcceleratorState._reset_state(reset_partial_state=True)`"
            )
        if (ranks := int(os.environ.get("WORLD_SIZE", 1))) != self.num_processes:
            raise MisconfigurationException(
                f"ZenFlowAccelerator: Accelerate must know of {ranks} ranks, got {self.num_processes}: on CPUs call"
                " `PartialState(backend='gloo')` first; TrainingArguments need accelerator_config={'use_configured_state': True} then"
            )
        # What needs the process group next may be no `prepare`: `gather`, or DeepSpeed's engine of a reference model.
        self.start()

    def start(self) -> ZenFlowStrategy:
        """Returns `strategy`, with the ranks and the device of this accelerator. The first call makes it, and the process group where no
        launcher has: Accelerate expects one under DeepSpeed. `prepare` replaces its DeepSpeed configuration.
        """
        if self.strategy is not None:
            return self.strategy
        config = without(self.deepspeed_plugin.deepspeed_config, "auto")
        config = {key: value for key, value in config.items() if key not in ("train_batch_size", *OF_THE_LOOP)}
        # What launchers set; else there is one rank, which sets it for DeepSpeed.
        is_launched = "LOCAL_RANK" in os.environ
        # Private: the limit of the ranks' group, which Accelerate has made, with the `ddp_timeout` of transformers; not all backends tell.
        backend: Any = dist.group.WORLD._get_backend(self.device) if is_launched and dist.group.WORLD else None
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        strategy = ZenFlowStrategy(config, **self._keys, **({} if timeout is None else {"timeout": timeout}))
        given = strategy.zenflow_config
        for key in given.model_fields_set & set(_OF_LIGHTNING):
            raise MisconfigurationException(
                f"ZenFlowAccelerator: {key} must be absent, got {getattr(given, key)!r}: it is of Lightning's checkpoints and callbacks"
            )
        ranks = world_size() if is_launched else 1
        # The second is that of DeepSpeed's launcher.
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks)
        strategy.cluster_environment = TorchElasticEnvironment() if is_launched else LightningEnvironment()
        # With an index, which Accelerate's has under a launcher only.
        strategy.parallel_devices = [torch.device(self.device.type, rank) for rank in range(on_host)]
        strategy.num_nodes = ranks // on_host
        strategy.accelerator = CPUAccelerator() if self.device.type == "cpu" else CUDAAccelerator()
        strategy.precision = DeepSpeedPrecision("32-true")
        strategy.calls = self.calls
        self.strategy = strategy
        strategy.setup_environment()
        return strategy

    @override
    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        models = [item for item in args if isinstance(item, Module)]
        optimizers = [item for item in args if isinstance(item, Optimizer | DummyOptim)]
        # Under stage 2 an engine without optimizer has no part in anything, and DeepSpeed refuses it.
        allowed = ((0, 0), (1, 1), (1, 0)) if self.deepspeed_plugin.zero_stage == 3 else ((0, 0), (1, 1))
        if (len(models), len(optimizers)) not in allowed:
            raise MisconfigurationException(
                f"accelerator.prepare must be given one model together with its one optimizer, got {len(models)} models and"
                f" {len(optimizers)} optimizers; several optimizers become parameter groups of one, and a model that is not trained goes to"
                " `accelerator.device`"
            )
        # DeepSpeed needs a number, whatever it is; and no class of its own takes the place of the optimizer's.
        self.deepspeed_plugin.deepspeed_config.setdefault("train_micro_batch_size_per_gpu", 1)
        self.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        with (
            # Accelerate makes engines by it, with the configuration that it has completed for the model.
            patch("deepspeed.initialize", self._initialize),
            patch("accelerate.accelerator.DeepSpeedOptimizerWrapper", partial(_Optimizer, self.start())),
        ):
            return tuple(super()._prepare_deepspeed(*args))

    def _initialize(
        self,
        model: Module,
        config_params: Mapping[str, Any],
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        model_parameters: Any = None,
    ) -> tuple[Any, Any, None, Any]:
        """In the place of ``deepspeed.initialize``: the engine, the optimizer and the scheduler, if the configuration has one."""
        strategy = self.start()
        _, given = resolve_config(config_params, {})
        strategy.config = prepare_deepspeed_config(
            {"gradient_clipping": 0.0, **(given or {}), "train_batch_size": None}
        )
        # For `get_state_dict`; Accelerate's plugin has False where its user has said nothing.
        strategy.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if optimizer is None and model_parameters is None:
            return strategy.setup_module(model), None, None, None
        if strategy.trained is not None:
            raise MisconfigurationException(
                "accelerator.prepare: a model with an optimizer has been prepared before: call `accelerator.free_memory()` when its"
                " training has ended, or train another one in another process"
            )
        if optimizer is not None:
            # As DeepSpeed does: with PEFT the second group of transformers' Trainer is empty. A scheduler needs those that it has marked.
            groups = optimizer.param_groups
            groups[:] = [group for group in groups if group["params"] or "initial_lr" in group]
        # Accelerate keeps the first, which may be of a model that is not trained.
        self.deepspeed_engine_wrapped = None
        # Private: the name of the engine's class in DeepSpeed's own `initialize`.
        with patch("deepspeed.DeepSpeedEngine", ZenFlowEngine):
            trained = strategy.begin_training(model, optimizer, lr_scheduler)
        if trained.zenflow.is_immediate and self.deepspeed_plugin.zero_stage != 3 and world_size() == 1:
            rank_zero_warn(
                f"{self.calls.front}: no weight is late, and parameters are on the device. `lightning_zenflow.OffloadAdamW` trains so in"
                " the place of torch.optim.AdamW, without DeepSpeed, under the plain Accelerator or Trainer"
            )
        return trained.engine, trained.optimizer, None, trained.engine.lr_scheduler

    @override
    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        return self.start().micro_batches.no_backward_sync(model, True)

    @override
    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True, **kwargs: Any) -> None:
        """Backward pass of a micro-batch, whose loss is divided by their number in a step if `scale_wrt_gas`."""
        strategy = self.start()
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps
        with strategy.micro_batches.no_backward_sync(strategy.model, not self.sync_gradients):
            strategy.backward(loss, strategy.model, **kwargs)

    @override
    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """`ZenFlowStrategy.clip_gradients_norm` of Fabric, behind the step's last backward pass, of all `parameters` that are trained."""
        strategy = self.start()
        if strategy.trained is None or not self.sync_gradients:
            raise RuntimeError(
                "accelerator.clip_grad_norm_ must come after `accelerator.prepare` and after the last micro-batch of a step: call it"
                " `if accelerator.sync_gradients`"
            )
        engine = strategy.trained.engine
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        others = [name for name, p in engine.module.named_parameters() if p.requires_grad and id(p) not in given]
        if others:
            raise MisconfigurationException(
                f"accelerator.clip_grad_norm_: parameters must be all that are trained, got all but {len(others)}, of which the first is"
                f" {others[0]}: ZenFlow clips by the norm of the whole gradient"
            )
        return strategy.clip_gradients_norm(engine, engine.optimizer, max_norm, norm_type)

    def log_summary(self) -> None:
        """Logs the strategy's summary, if there is one that has not been logged."""
        summary = None if self.strategy is None else self.strategy.summary()
        if summary not in (None, self._said):
            rank_zero_info(summary)
        self._said = summary

    @override
    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's, and ends the training: the model is as before `prepare`, with exact weights. All ranks call it together."""
        self.log_summary()
        strategy, self.strategy = self.strategy, None
        if strategy is not None:
            trained = strategy.trained
            try:
                # Without the gradients of a step that was interrupted.
                if trained is not None:
                    trained.flush()
            finally:
                # DeepSpeed's `destroy` comes with the strategy's.
                self.deepspeed_engine_wrapped = None
                strategy.teardown()
                if trained is not None and trained.training.closed:
                    # Transformers' Trainer keeps its engine, and nothing saves the state any more.
                    trained.training.end(keep_state=False)
                    trained.optimizer.optimizer.state.clear()
        return super().free_memory(*objects)

    @override
    def end_training(self) -> None:
        """As Accelerate's, and `free_memory`; a further Accelerator or Trainer of this process may be a plain one."""
        self.free_memory()
        super().end_training()
        # All accelerators of a process share their state; this one keeps what it has.
        self.state.__dict__ = dict(AcceleratorState._shared_state)
        AcceleratorState._reset_state()


class _Optimizer(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """The optimizer that `prepare` returns."""

    optimizer: ZenFlowOptimizer
    gradient_state: GradientState
    zero_grad = AcceleratedOptimizer.zero_grad  # which DeepSpeed's wrapper leaves out

    def __init__(self, strategy: ZenFlowStrategy, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._strategy = strategy

    @override
    def step(self, closure: None = None) -> None:
        # Under torch a step without gradients changes nothing, and a callback of transformers cannot leave it out.
        has_gradients = self.optimizer.training.steps.micro_batches > 0
        if self.gradient_state.sync_gradients and (has_gradients or closure is not None):
            self._strategy.optimizer_step(self, **({} if closure is None else {"closure": closure}))
