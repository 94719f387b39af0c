"""The strategy for `lightning.fabric.Fabric`: the user's own training loop; what `fabric.save` and `fabric.load` name."""

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.fabric.strategies
from lightning.fabric.plugins import DeepSpeedPrecision
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.deepspeed import _validate_state_keys
from lightning.fabric.utilities.load import _move_state_into
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.checkpoints import Checkpoints, Source, all_cores
from lightning_zenflow.checkpoint.engine import (
    FolderSource,
    engine_in,
    load_file_together,
    load_together,
    optimizer_of,
    read_file_together,
    to_save,
)
from lightning_zenflow.checkpoint.files import refusal
from lightning_zenflow.checkpoint.single_file import FILE_KEY, FileSource
from lightning_zenflow.config import KEYS, ZenFlowConfig
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.core.process import one_at_a_time
from lightning_zenflow.deepspeed.config import prepare_deepspeed_config, read_settings
from lightning_zenflow.deepspeed.environment import PlainPrecision, RankProcess, own_precision
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine, inference_engine, leaving_engines
from lightning_zenflow.deepspeed.users_module import load_whole
from lightning_zenflow.deepspeed.users_objects import refuse_unsupported_module, validate_optimizer
from lightning_zenflow.steps import LoopSteps, MicroBatches, naming_late_reads

OF_THE_LOOP = {
    "optimizer": "give it to `fabric.setup(model, optimizer)`",
    "scheduler": "call its `step()` in the loop",
    "gradient_accumulation_steps": "use `fabric.no_backward_sync(model)` for all micro-batches of a step but the last",
}
"""Keys of a DeepSpeed configuration that Fabric's loop has a call for, which is what to do instead."""


class ZenFlowPrecision(PlainPrecision, DeepSpeedPrecision):
    """`PlainPrecision` for Fabric."""

    @override
    def convert_output(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_output(data)


class ZenFlowStrategy(DeepSpeedStrategy):
    """Trains with ZeRO-2, or ZeRO-3, and the optimizer states in host memory, without waiting for the CPU.

    ``Fabric(strategy=ZenFlowStrategy(topk_ratio=0.05))`` is complete; the loop stays as it is::

        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            fabric.backward(model(batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

    All micro-batches of a step but the last run under `fabric.no_backward_sync(model)`. Weights are exact after `fabric.save`,
    `model.state_dict()`, `optimizer.state_dict()`, a forward pass in evaluation mode and `flush`, which all ranks call together.

    Fabric does not call `teardown`. All ranks call it together behind `flush` or `fabric.save`: the modules are then as before
    `fabric.setup`, with their present weights. Without it the worker ends with the last reference to model, optimizer and Fabric.

    Args:
        config: as of `lightning_zenflow.ZenFlowStrategy`, which raises the same errors.
        **options: keys of `ZenFlowConfig`, and keywords of Fabric's `DeepSpeedStrategy`, such as `stage` or `timeout`.

    Attributes:
        trained: the present or last training; None before the first.
    """

    calls = Calls(
        setup="model, optimizer = fabric.setup(model, optimizer)",
        backward="fabric.backward",
        clip="fabric.clip_gradients",
        accumulate="run all micro-batches of a step but the last under `fabric.no_backward_sync(model)`",
        read="behind `fabric.backward`",
        write="before the forward pass or behind `optimizer.step`",
    )
    # Lightning would read the variable's file again, and as JSON (`read_settings`).
    DEEPSPEED_ENV_VAR = ""

    def __init__(self, config: ZenFlowConfig | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        keys = {key: options.pop(key) for key in KEYS if key in options}
        self._settings = read_settings(config, options, DeepSpeedStrategy, **keys)
        super().__init__(config=self._settings.deepspeed, **options)
        self.config: dict[str, Any] = prepare_deepspeed_config(self.config)
        self.zenflow_config = self._settings.zenflow
        for key, instead in OF_THE_LOOP.items():
            if self.config.get(key) not in (None, "auto", 1):
                raise MisconfigurationException(
                    f"DeepSpeed config: {key} must be absent with Fabric, got {self.config[key]!r}: {instead}"
                )
        if "stall_monitor" in self.zenflow_config.model_fields_set and self.zenflow_config.stall_monitor:
            rank_zero_info(
                "ZenFlow: stall_monitor has no effect in a loop: log `strategy.metrics()` and `strategy.summary()`"
            )
        # DeepSpeed clips to 1 where nothing is said.
        self.config = {"gradient_clipping": 0.0, **self.config}
        self._process = RankProcess()
        self.trained: TrainedEngine | None = None
        self._checkpoints = Checkpoints(self.zenflow_config)
        # DeepSpeed's, of models that are not trained; a user may drop them before.
        self._inference: weakref.WeakSet[Module] = weakref.WeakSet()
        # Lightning's own extension point, though its name is private; `DeepSpeedStrategy` has none.
        self._backward_sync_control = self.micro_batches = MicroBatches()
        self._steps: LoopSteps | None = None

    @property
    def zenflow_optimizer(self) -> ZenFlowOptimizer | None:
        """The optimizer of `trained`."""
        return None if self.trained is None else self.trained.optimizer

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, which has all batches."""
        return self.num_nodes * self.num_processes == 1

    @override
    def _configure_launcher(self) -> None:
        # One process launches nothing. Lightning refuses launchers in notebooks, also where they would start no process.
        if not self.is_alone:
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        self._process.set_up(self, lightning.fabric.strategies, super().setup_environment, is_alone=self.is_alone)

    @DeepSpeedStrategy.precision.setter  # type: ignore[attr-defined, untyped-decorator]  # mypy sees no property
    def precision(self, precision: Any) -> None:
        """Replaces Lightning's plugin by this package's (`own_precision`)."""
        # Private: where Fabric looks for one that the user gave the strategy.
        self._precision = own_precision(precision, ZenFlowPrecision)

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:
        """None for one rank, which has all batches: Fabric leaves its samplers as they are."""
        return None if self.is_alone else super().distributed_sampler_kwargs

    @override
    def setup_module(self, module: Module) -> Any:
        """Sets up a further model, for inference only."""
        engine = inference_engine(module, self.config, self.root_device)
        self._inference.add(engine)
        return engine

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Sets up the model that is trained, with one optimizer, AdamW or Adam. The loop calls the scheduler's `step()`."""
        if len(optimizers) != 1:
            raise MisconfigurationException(
                f"fabric.setup: ZenFlowStrategy must have one optimizer, got {len(optimizers)}: use its parameter groups"
            )
        if self.trained is not None:
            raise MisconfigurationException(
                "fabric.setup: ZenFlowStrategy must have one model with an optimizer, got a second one: for models that are not trained"
                " call `fabric.setup_module(model)`, and train another one with another Fabric"
            )
        trained = self.begin_training(module, optimizers[0])
        # Private: as in the base class' own set-up.
        self._set_deepspeed_activation_checkpointing()
        return trained.engine, [trained.optimizer], scheduler

    def begin_training(self, module: Module, optimizer: Optimizer | None, scheduler: Any = None) -> TrainedEngine:
        """Checks what is trained, builds its engine, and sets up what the loop's calls need."""
        refuse_unsupported_module(module)
        if optimizer is not None:
            validate_optimizer(optimizer, module)
        trained = TrainedEngine(module, optimizer, self, self._settings, self.calls, scheduler)
        self.trained, self.zenflow_config = trained, trained.zenflow
        # Fabric tears nothing down.
        weakref.finalize(self, trained.ending.close)
        self._checkpoints.begin(trained, self)
        # Private: Fabric's own attribute, which it writes to where the loop names the model in `fabric.backward`.
        self._deepspeed_engine = trained.engine
        self._steps = LoopSteps(trained, self.micro_batches, self._checkpoints.check)
        return trained

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward pass of a micro-batch; the last of a step is the one outside of `fabric.no_backward_sync`."""
        with self._steps_for(self.calls.backward).backward(module), naming_late_reads():
            # DeepSpeed would divide by the number of micro-batches, which the loop has done.
            super().backward(tensor, module, *args, scale_wrt_gas=False, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips this step's gradients by the norm of the whole gradient, to the smallest `max_norm` > 0 that is given; infinity: no
        clipping. Backward passes of later steps predict the clip factor with it. `error_if_nonfinite` has no effect: a step whose norm is
        not finite changes nothing. Returns the norm before clipping, of the gradients of all ranks: 0-D float32 on the device.
        """
        return self._steps_for(self.calls.clip).clip(max_norm, norm_type)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        raise MisconfigurationException(
            f"fabric.clip_gradients: clip_val must be absent under ZenFlow, got {clip_val!r}: it clips by norm only, with max_norm"
        )

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise MisconfigurationException(
                f"optimizer.step must be without arguments under ZenFlow, got {', '.join(kwargs)}: call `{self.calls.backward}` before"
            )
        with (steps := self._steps_for("optimizer.step")).step():
            return super().optimizer_step(steps.engine)

    def flush(self) -> None:
        """Makes weights and optimizer states exact, between two steps; raises errors of saves. All ranks call it together."""
        if self._steps is not None:
            self._steps.flush()

    def give_back(self) -> None:
        """`Training.give_back`."""
        if self.trained is not None:
            self.trained.training.give_back()

    def _steps_for(self, call: str) -> LoopSteps:
        if self._steps is None:
            raise RuntimeError(f"{call}: no model has been set up; call `{self.calls.setup}` before")
        return self._steps

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next step belongs to, counted from 0; counts where `select_strategy` is "epoch"."""
        if self.trained is not None:
            self.trained.training.start_epoch(epoch)

    def wait_for_checkpoint(self) -> None:
        """Waits for the checkpoint that is written in the background; raises its OSError on all ranks, which call it together."""
        self._checkpoints.wait()

    def metrics(self) -> dict[str, float]:
        """This rank's metrics of the steps since the last call, by the names of docs/tuning.md; none without a step. Time from a forward
        pass in evaluation mode to the next one in training is not part of a step.
        """
        return {} if self._steps is None else self._steps.meter.metrics()

    def summary(self) -> str | None:
        """Step times and waits so far, with a line of advice if something limits; None before the second step."""
        return None if self._steps is None else self._steps.meter.summary()

    @override
    @one_at_a_time()
    def teardown(self) -> None:
        """Ends the worker; modules and optimizer are what they were before, with the weights of now and without the optimizer's state."""
        if self.trained is not None and self.trained.training.is_elsewhere:
            return
        # As in a `finally` behind the loop.
        together = sys.exc_info()[0] is None and not (self._steps is not None and self._steps.was_interrupted)
        with ExitStack() as last:
            last.callback(self._checkpoints.end, together=together)
            engines = [*([] if self.trained is None else [self.trained.engine]), *self._inference]
            with leaving_engines(engines, self.trained, ranks_on_host=self.num_processes, together=together):
                super().teardown()
                self._process.end()

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self._steps is not None:
            self._steps.make_exact()
        with all_cores(ranks_on_host=self.num_processes):
            self._checkpoints.save(path, self._source(state, filter), self.checkpoint_io, storage_options)

    def _source(self, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None) -> Source:
        """One file, which Fabric's other strategies read as well, or a folder, which the Trainer's strategy and DeepSpeed read."""
        engine, ours = engine_in(state)
        optimizer, without_frozen = optimizer_of(engine), self.exclude_frozen_parameters
        others = {name: item for name, item in state.items() if name not in ours}
        # Private: what Lightning's own strategies convert and filter objects with.
        convert = self._convert_stateful_objects_in_state
        if not self._checkpoints.is_one_file(world_size=self.world_size):
            if filter is not None:
                raise TypeError(f"filter must be None for a folder, got {filter!r}: nothing reads it")
            _validate_state_keys(others)
            client_state = convert(to_save(others, engine), {})
            return FolderSource(
                engine=engine, state=optimizer, client_state=client_state, without_frozen=without_frozen
            )
        if FILE_KEY in state:
            raise MisconfigurationException(f"fabric.save: no entry may have the name {FILE_KEY!r}, which is ours")
        converted, weights = convert(others, {}), engine.module.state_dict()
        moments = any(item is engine.optimizer for item in ours.values())

        def content(file: FileSource) -> dict[str, Any]:
            of_ours = {name: file.weights if item is engine else file.optimizer_state for name, item in ours.items()}
            return dict(convert({name: {**converted, **of_ours}[name] for name in state}, filter or {}))

        return FileSource(engine, optimizer, weights, content, moments=moments, without_frozen=without_frozen)

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        load_whole(module, state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """State of `optimizer.state_dict()`, exact; errors are those of `flush`."""
        self.flush()
        return super().get_optimizer_state(optimizer)

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if isinstance(state, Optimizer | ZenFlowOptimizer):
            raise MisconfigurationException(
                "fabric.load_raw: obj must be the model, got its optimizer, whose state is in parts; use `fabric.save` and `fabric.load`"
            )
        self.wait_for_checkpoint()
        self.flush()
        if not isinstance(state, Module):
            return self._load_all(path, state or {}, strict=strict, weights_only=weights_only)
        # DeepSpeed's engine names its parameters "module.NAME".
        super().load_checkpoint(path, getattr(state, "module", state), strict, weights_only)
        if self.trained is not None and state is self.trained.engine:
            self.trained.optimizer.reset_master_from_model()
        return {}

    def _load_all(self, path: Any, state: dict[str, Any], *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        """Loads what `read_file_together` or `load_together` reads; returns what it has besides model and optimizer."""
        engine, ours = engine_in(state)
        optimizers = [name for name, item in ours.items() if item is not engine]
        names = state.keys() - ours.keys()
        saved = read_file_together(path, self.checkpoint_io, weights_only=weights_only)
        if saved is not None:
            saved.unmap_others(tuple(ours))
            (weights,) = (saved.entry(name) for name, item in ours.items() if item is engine)
            states = saved.entry(optimizers[0]) if optimizers else None
            load_file_together(engine, saved, weights, states, strict=strict)
            rest = {name: value for name, value in saved.content.items() if name not in ours}
        elif weights_only:
            raise refusal(
                path, "weights_only must be false for a folder, in which DeepSpeed has Python objects, got true"
            )
        else:
            rest = load_together(engine, path, strict=strict, optimizer_states=bool(optimizers))
            if optimizer_of(engine) is None:
                # As in the base class: what DeepSpeed has under these names is not the user's.
                names -= {"optimizer", "lr_scheduler"}
        if strict and (missing := names - rest.keys()):
            raise refusal(path, f"the checkpoint must have an entry {min(missing)!r}, got {', '.join(map(str, rest))}")
        # Private: what Lightning's own strategies load further objects with.
        _move_state_into(rest, state, keys=names)
        return rest
