"""One model's training under ZenFlow on one rank, and its saves: what the Trainer's strategy and Fabric's do alike."""

import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.background import BackgroundSaves
from lightning_zenflow.checkpoint.collective import Put, save_together
from lightning_zenflow.checkpoint.engine import deepspeed_files
from lightning_zenflow.checkpoint.files import place_of
from lightning_zenflow.checkpoint.single_file import FILE_KEY, WholeState
from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.core.distributed import in_common
from lightning_zenflow.core.errors import Calls, MisconfigurationException, raise_late_read
from lightning_zenflow.core.process import one_at_a_time, threads
from lightning_zenflow.deepspeed.config import (
    ConfigSource,
    offloads_parameters,
    prepare_deepspeed_config,
    refuse_options,
    resolve_config,
    set_bucket_size,
)
from lightning_zenflow.deepspeed.environment import (
    RankEnvironment,
    in_place_of_deepspeeds,
    restore_types,
)
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.removal import Released, as_in_training, make_whole, pickled_as_before, release
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.deepspeed.users_objects import UsersOptimizer
from lightning_zenflow.offload.build import rank_resources
from lightning_zenflow.training import Training
from lightning_zenflow.worker.process import WorkerError

Built = TypeVar("Built", bound=tuple[Any, ...])


class Session(RankEnvironment):
    """Mixin of a `DeepSpeedStrategy`: the life of the optimizer, from the set-up of the engine to the end of the worker; formats, plugins
    and the collective save of its checkpoints.

    A set-up replaces the one before it; what has been closed stays readable.

    Args:
        config: source of the keys that are None or absent in `keys`, in any form that `resolve_config` reads; None: the environment
            variable by which Lightning takes a DeepSpeed configuration, if it is set.
        keys: values of keys of `ZenFlowConfig`.
        options: keywords of Lightning's strategy.

    Attributes:
        zenflow_config: the validated configuration; after a set-up, the one of this training (see `ZenFlowConfig.without_measurements`).
        zenflow_optimizer: the optimizer of the present or last set-up; None before the first.

    Raises:
        RuntimeError: this version of Lightning lacks a method that the strategy overrides; and what both strategies raise.
    """

    config: Any
    zenflow_config: ZenFlowConfig
    zenflow_optimizer: ZenFlowOptimizer | None
    calls = Calls()
    # As the device of modules on it: `module.to` with an index would give weights other memory.
    _cpu = torch.device("cpu")

    def __init__(self, config: ConfigSource, keys: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        base = self.deepspeed_strategy
        if config is None:
            config = os.environ.get(base.DEEPSPEED_ENV_VAR)
        check_keys(options, (*KEYS, *inspect.signature(base).parameters), "ZenFlowStrategy")
        given = {key: value for key, value in keys.items() if value is not None}
        self.zenflow_config, self._users_config = resolve_config(config, given)
        refuse_options(options, beside_config=self._users_config is not None)
        self.zenflow_optimizer = None
        self._frozen_at_setup: dict[str, Tensor] = {}
        # Names of the parameters of each group of the user's optimizer.
        self._optimized: list[list[str]] = []
        # DeepSpeed's, of the present or last training; and what is needed for saves when that has ended.
        self._trained: Any = None
        self._released: list[Released] = []
        self._users_optimizer: UsersOptimizer | None = None
        # During a training with `async_checkpoints`.
        self._background: BackgroundSaves | None = None
        # What must end with the training; refers to no strategy.
        self._ending = ExitStack()
        super().__init__(config=self._users_config, **options)
        self.config = prepare_deepspeed_config(self.config)
        said = {**options, **((self._users_config or {}).get("zero_optimization") or {})}
        self._chooses_buckets = said.get("reduce_bucket_size") in (None, "auto")
        if offloads_parameters(self.config):
            if unused := self.zenflow_config.without_effect_on_host:
                rank_zero_info(
                    f"ZenFlow: {', '.join(unused)} has no effect with parameters in host memory: nothing is late"
                )
            self.zenflow_config = self.zenflow_config.with_weights_on_host()
        self._given_config = self.zenflow_config

    @override
    def _load_config(self, config: Any) -> Any:
        # Private: called with what `resolve_config` has read. For None, Lightning would read the environment variable's file as JSON.
        return config

    @one_at_a_time()
    def _set_up(self, initialize: Callable[[], Built], model: Module, optimizer: Optimizer | None) -> Built:
        """Builds the engine with ZenFlow's optimizer; all ranks call it together.

        Args:
            initialize: calls ``deepspeed.initialize`` with `config`; the engine is the first item of its result.
            model: the model to train.
            optimizer: the user's; None: the DeepSpeed configuration has one.

        Raises:
            MisconfigurationException: ZenFlow does not support the model, the optimizer or the configuration, or they do not fit the host's
                memory.
            WorkerError: the worker did not start.
            RuntimeError: another rank has failed, whose error is in the message.
        """
        self._end_background()
        # What a training before has left is as large as what this one needs.
        self._trained, self._released, self.zenflow_optimizer = None, [], None
        self.zenflow_config = self._given_config
        # Runs must repeat where the user asks torch for it; `Trainer(deterministic=...)` does as well. Measured memory changes no bit.
        if self._given_config.measures and torch.are_deterministic_algorithms_enabled():
            self.zenflow_config = fixed = self._given_config.without_measurements()
            rank_zero_info(
                f"ZenFlow: torch's deterministic algorithms are on, so that runs must repeat: update_interval={fixed.update_interval},"
                f" publish_lag={fixed.publish_lag}, and no measured time changes them. If steps wait for the CPU, set larger values"
            )
        resources = rank_resources(
            self.zenflow_config,
            self.root_device,
            ranks_on_host=self.num_processes,
            world_size=self.world_size,
            timeout=self._timeout,
        )
        if self.root_device.type == "cpu":
            self._ending.callback(threads.begin())
            torch.set_num_threads(min(resources.cores.trainer_threads, torch.get_num_threads()))
        self._users_optimizer = None if optimizer is None else UsersOptimizer(optimizer)
        if optimizer is not None:
            named = {id(p): (name, p) for name, p in model.named_parameters()}
            optimized = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            self._frozen_at_setup = {name: p for of_group in optimized for name, p in of_group if not p.requires_grad}
            self._optimized = [[name for name, _ in of_group] for of_group in optimized]
            for group in optimizer.param_groups:
                # DeepSpeed takes the type of the first one for that of the training, and drops frozen ones, such as quantised weights.
                group["params"].sort(key=lambda p: not p.requires_grad)
        if self._chooses_buckets:
            set_bucket_size(self.config, model)
        is_3 = self.config["zero_optimization"]["stage"] == 3
        kind: type[ZenFlowOptimizer] = ZenFlowZero3Optimizer if is_3 else ZenFlowZeroOptimizer
        self._cpu = RankEnvironment._cpu
        try:
            training = Training(self.zenflow_config, resources, self.calls, self._frozen_at_setup)
            with in_place_of_deepspeeds(kind, partial(kind, training=training), model) as optimizers:
                built = initialize()
        finally:
            del self._cpu
        (self.zenflow_optimizer,), self._trained = optimizers, built[0]
        if optimizer is None:
            self._optimized = [list(of_group) for of_group in self.zenflow_optimizer.training.shapes_by_group]
        # More than `close`: DeepSpeed's engine outlives the training, and its hooks would keep the arena alive.
        self._ending.callback(self.zenflow_optimizer.destroy)
        self._ending.enter_context(pickled_as_before([*model.modules(), *model.parameters()]))
        if self.zenflow_config.async_checkpoints:
            self._background = BackgroundSaves(ranks_on_host=self.num_processes, timeout=self._timeout)
        return built

    def _begin_micro_batch(self) -> None:
        """Before a forward pass in training, and before a backward pass: makes the state exact after an interrupted step; before the first
        backward pass of a step, of which there may be several in a batch, follows changes of `requires_grad`.

        Raises:
            MisconfigurationException: a parameter that was frozen at setup is not any more.
        """
        if self.zenflow_optimizer is not None:
            self.zenflow_optimizer.training.before_forward()

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next step belongs to, counted from 0; counts where `select_strategy` is "epoch".

        The Trainer does it; a loop under Fabric does it by itself.
        """
        if self.zenflow_optimizer is not None:
            self.zenflow_optimizer.training.start_epoch(epoch)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward pass without DeepSpeed's division by the number of micro-batches, which Lightning or the loop has done."""
        if (optimizer := self.zenflow_optimizer) is not None:
            optimizer.training.before_backward(last=optimizer.is_gradient_accumulation_boundary())
        try:
            return super().backward(*args, scale_wrt_gas=False, **kwargs)
        except RuntimeError as error:
            raise_late_read(error)
            raise

    def flush(self, *, in_save: bool = False) -> None:
        """Makes weights and optimizer states exact. After a training that ended with an exception, weights stay as they are. All ranks call
        it together.

        Raises:
            OSError: a save in the background has failed; not at the begin of the next save (`in_save`), which is made before.
        """
        if self.zenflow_optimizer is not None and not self.zenflow_optimizer.training.closed:
            self.zenflow_optimizer.flush()
        if self._background is not None and not in_save:
            self._background.check()

    @abstractmethod
    def _in_engines(self) -> Sequence[Module]:
        """Modules that DeepSpeed has, or the engines around them."""

    @property
    @abstractmethod
    def _ends_together(self) -> bool:
        """Whether all ranks tear down together, and none because of an error."""

    @override
    @one_at_a_time()
    def teardown(self) -> None:
        """Ends the worker, releases the shared memory and makes the modules what they were before, with their weights as they are now; the
        optimizer has their parameters again, and no state.
        """
        if self.zenflow_optimizer is not None and self.zenflow_optimizer.training.is_elsewhere:
            # Behind `sys.exit` in a child that a hook has forked.
            self._background = None
            return
        with ExitStack() as last:
            last.callback(self._end_background)
            self._ending.close()
            models = self._in_engines()
            for model in models:
                make_whole(model, ranks_on_host=self.num_processes, together=self._ends_together)
            try:
                super().teardown()
            finally:
                released = [release(model) for model in models]
                for model in models:
                    restore_types(model)
                # An evaluation after a training releases nothing of it.
                if any(model is self._trained for model in models):
                    self._released = released
                if self._users_optimizer is not None:
                    optimizer = self.zenflow_optimizer
                    has_trained = optimizer is not None and optimizer.training.steps.number > 0
                    self._users_optimizer.give_back(has_trained=has_trained)

    def wait_for_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written in the background, if any (`async_checkpoints`). All ranks call it together.

        Raises:
            OSError: it could not be saved, on this rank or on another one.
        """
        if self._background is not None:
            self._background.wait()

    def _end_background(self) -> None:
        background, self._background = self._background, None
        if background is None or (self.zenflow_optimizer is not None and self.zenflow_optimizer.training.is_elsewhere):
            return
        # Otherwise training ends with another error, and the thread has logged this one.
        with nullcontext() if self._ends_together else suppress(Exception):
            background.close(together=self._ends_together)

    def _background_of(self, path: Any) -> BackgroundSaves | None:
        """What finishes the save of a checkpoint; None: the training thread, or a user's plugin, which decides itself when it writes."""
        return self._background if self._plugin is None else None

    def _saves_file(self, *, weights_only: bool = False) -> bool:
        """Whether a checkpoint is one file (`checkpoint_format`)."""
        format_ = self.zenflow_config.checkpoint_format
        return weights_only or format_ == "lightning" or (format_ == "auto" and self.world_size == 1)

    @property
    def _plugin(self) -> CheckpointIO | None:
        """The user's plugin for checkpoints, if there is one."""
        # Private: where Lightning keeps it, or a `TorchCheckpointIO` of its own. There is one in each of its packages.
        plugin: CheckpointIO | None = self._checkpoint_io
        return None if type(plugin).__name__ == "TorchCheckpointIO" else plugin

    def _io_of(self, place: Path | str) -> CheckpointIO | None:
        """What writes, reads and removes a file: a plugin of the user's, or Lightning's own in a store; None: this package, as folders."""
        is_ours = isinstance(place, Path) and (self._plugin is None or place.is_dir())
        return None if is_ours else self.checkpoint_io

    def _refuse_folder(self, path: Any) -> None:
        """Raises MisconfigurationException if a checkpoint that is a folder cannot be written here."""
        if self._plugin is not None or isinstance(place_of(path), str):
            raise MisconfigurationException(
                f"checkpoint_format must be 'lightning', one file, for checkpoints in {path} by {type(self.checkpoint_io).__name__}, got"
                f" {self.zenflow_config.checkpoint_format!r}: folders, the default on several ranks, need a local path and no plugin"
            )

    def _save_folder(self, path: Any, engine: Any, save: Callable[[Any], None]) -> None:
        """Saves DeepSpeed's folder, by a method that has its engine save to a path; as `_save`."""

        def write(folder: Path | str, put: Put) -> None:
            with deepspeed_files(engine, put):
                save(folder)

        self._refuse_folder(path)
        self._save(path, write)

    def _save_file(
        self, path: Any, state: WholeState, content: Callable[[], Mapping[str, Any]], storage_options: Any
    ) -> None:
        """Saves one file with `content`, which rank 0 calls when `state` is put together; as `_save`."""
        io = self._io_of(place_of(path))
        if io is None and storage_options is not None:
            raise TypeError(f"storage_options must be None without a plugin that reads them, got {storage_options!r}")

        def write(file: Path | str, put: Put) -> None:
            if self.is_global_zero:
                whole = {**content(), **({} if state.run_state is None else {FILE_KEY: state.run_state})}
                save = torch.save if io is None else partial(io.save_checkpoint, storage_options=storage_options)
                put(whole, save, file if io is None else path)

        self._save(path, write, state)

    def _save(self, path: Any, write: Callable[[Any, Put], None], state: WholeState | None = None) -> None:
        """Saves the exact state after the last step, atomically; as `save_together`, by default of the optimizer.

        Raises:
            OSError: the save failed; or the one before, in the background, behind which this one is made.
            WorkerError: the exact state is lost, or an exception has interrupted the ranks in different steps.
        """
        before: OSError | None = None
        try:
            self.wait_for_checkpoint()
        except OSError as error:
            before = error
        place = self.broadcast(place_of(path) if self._io_of(place_of(path)) is None else str(path))
        if self.zenflow_optimizer is not None:
            self.zenflow_optimizer.flush()
            if not in_common([self.zenflow_optimizer.training.steps.number]):
                raise WorkerError(
                    "an exception has interrupted the ranks in different steps: no state is exact; continue from the last checkpoint"
                )
        # A file has the parameters as they are after training, DeepSpeed's code needs its own attributes of them.
        with (
            pickled_as_before(p for of_module in self._released for p in of_module),
            nullcontext() if state is not None else as_in_training(self._released),
            self._optimizer_in_training(),
        ):
            save_together(
                place,
                write,
                state or self.zenflow_optimizer,
                sync=self.zenflow_config.sync_checkpoints,
                background=self._background_of(path),
            )
        if before is not None:
            raise before

    def _optimizer_in_training(self) -> AbstractContextManager[None]:
        return nullcontext() if self._users_optimizer is None else self._users_optimizer.in_training()
