"""DeepSpeed's engine of one training, from its construction to the end of the worker; and of a model that is not trained."""

import argparse
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import DeepSpeedEngine, initialize
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zenflow.core.errors import Calls
from lightning_zenflow.core.process import one_at_a_time, threads
from lightning_zenflow.deepspeed.config import Settings, of_one_training, set_bucket_size
from lightning_zenflow.deepspeed.environment import Strategy, restore_types
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.deepspeed.users_module import (
    Released,
    is_divided,
    make_whole,
    note_users_flags,
    pickled_as_before,
    release,
    remove_hooks,
)
from lightning_zenflow.deepspeed.users_objects import UsersOptimizer
from lightning_zenflow.offload.build import rank_resources
from lightning_zenflow.training import Training


@contextmanager
def in_place_of_deepspeeds(ours: type[ZenFlowOptimizer], factory: Callable[..., Any], module: Module) -> Iterator[None]:
    """Makes ``deepspeed.initialize`` of a module build its optimizer by `factory`, for the class that `ours` extends; an error destroys it.

    Private: the engine finds its optimizer's class by a name in a module, and has no other extension point.
    """
    built: list[Any] = []
    scalars = _lay_out_for_broadcast(module)

    def restore_scalars() -> None:
        for scalar in scalars:
            scalar.data = scalar.data.view(())
        scalars.clear()

    def build(*args: Any, **kwargs: Any) -> Any:
        restore_scalars()
        built.append(factory(*args, **kwargs))
        return built[-1]

    try:
        with patch.object(ours.namespace, ours.__bases__[-1].__name__, build):
            yield
        if not built:
            raise RuntimeError(
                f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__}, whose engine built another optimizer; it is tested with"
                " 0.19.8: install that version or a newer lightning-zenflow"
            )
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        for unused in built:
            unused.destroy()
            unused.training.end(keep_state=False)
        raise
    finally:
        restore_scalars()


def new_engine(
    module: Module, optimizer: Optimizer | None, config: dict[str, Any], device: torch.device, scheduler: Any = None
) -> DeepSpeedEngine:
    """DeepSpeed's engine of a model, with the optimizer that its configuration has if there is no other."""
    note_users_flags(module)
    return initialize(
        # How DeepSpeed is told a rank's device, a CPU's too.
        args=argparse.Namespace(device_rank=device.index or 0),
        config=config,
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=scheduler,
        dist_init_required=False,
    )[0]


@one_at_a_time()
def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device) -> DeepSpeedEngine:
    """DeepSpeed's engine of a model without optimizer, whose weights get the precision of the training's configuration and, under stage 3,
    are divided. Hooks of an engine before are removed; the user's stay.
    """
    remove_hooks(module)
    keys = ("fp16", "bf16", *(["zero_optimization"] if config["zero_optimization"]["stage"] == 3 else []))
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in keys if key in config}}
    # In bf16 it prints the memory in use, on six lines.
    with redirect_stdout(io.StringIO()):
        return new_engine(module, None, settings, device)


def _lay_out_for_broadcast(module: Module) -> list[Parameter]:
    """Makes parameters contiguous, with a dimension at least, for DeepSpeed's broadcasts; returns the scalars, to be restored."""
    # Stage 3 may have partitioned some before, which have no memory.
    whole = [p for p in module.parameters() if not is_divided(p)]
    scalars = [p for p in whole if p.dim() == 0]
    for parameter in whole:
        flat = parameter.data.reshape(-1)
        if flat.stride() != (1,):
            # Not by `contiguous`: it leaves the stride of one element as it is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        parameter.data = flat.view(parameter.shape or (1,))
    return scalars


class TrainedEngine:
    """What a set-up makes; all ranks make it together. A front, which gives its own strategy, settings and calls, holds that of the present
    training, or of the last one. `optimizer` is None where the strategy's `config` has one.

    Attributes:
        zenflow: keys of this training.
        released: when training has ended, what saves need of it.
        ending: what ends with the training; it refers to no strategy.
    """

    @one_at_a_time()
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | None,
        strategy: Strategy,
        settings: Settings,
        calls: Calls,
        scheduler: Any = None,
    ) -> None:
        self.zenflow, device = of_one_training(settings.zenflow), strategy.root_device
        config: dict[str, Any] = strategy.config or {}
        self.released: Released = {}
        groups: list[list[Tensor]] = [] if optimizer is None else [list(g["params"]) for g in optimizer.param_groups]
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        frozen = {names[p]: p for of_group in groups for p in of_group if not p.requires_grad}
        order = [[names[p] for p in of_group] for of_group in groups]
        self._users = None if optimizer is None else UsersOptimizer(optimizer)
        with ExitStack() as undo:
            if self._users is not None:
                undo.callback(self._users.give_back, has_trained=False)
            resources = rank_resources(
                self.zenflow,
                device,
                ranks_on_host=strategy.num_processes,
                world_size=strategy.world_size,
                timeout=strategy._timeout,
            )
            self.ending = undo.enter_context(ExitStack())
            if device.type == "cpu":
                self.ending.callback(threads.begin())
                torch.set_num_threads(min(resources.cores.trainer_threads, torch.get_num_threads()))
            if settings.chooses_buckets:
                set_bucket_size(config, model)
            kind: type[ZenFlowOptimizer] = ZenFlowZero3Optimizer if strategy.zero_stage_3 else ZenFlowZeroOptimizer
            self.training = Training(self.zenflow, resources, calls, frozen, order)
            with in_place_of_deepspeeds(kind, partial(kind, training=self.training, users=self._users), model):
                self.engine = new_engine(model, optimizer, config, device, scheduler)
            undo.pop_all()
        self.optimizer: ZenFlowOptimizer = self.engine.optimizer
        # More than `close`: DeepSpeed's engine outlives the training, and its hooks would keep the arena alive.
        self.ending.callback(self.optimizer.destroy)
        self.ending.enter_context(pickled_as_before([*model.modules(), *model.parameters()]))

    def flush(self, *, lays_down: bool = True) -> None:
        """Makes weights and optimizer states exact (`Training.flush`); nothing when training has ended. All ranks call it together."""
        if not self.training.closed:
            self.training.flush(lays_down=lays_down)

    def give_back(self) -> None:
        """Gives the user's optimizer back, behind the end of the worker; saves go on with what it had in training."""
        users, self._users = self._users, None
        if users is not None:
            users.give_back(has_trained=self.training.steps.number > 0)
            self.optimizer.optimizer = users.optimizer


@contextmanager
def leaving_engines(
    models: Sequence[Module], trained: TrainedEngine | None, *, ranks_on_host: int, together: bool
) -> Iterator[None]:
    """Ends the worker; context of Lightning's teardown. The modules are then what they were before, with their present weights; the user's
    optimizer has their parameters again, and no state. `models` are modules that DeepSpeed has, or the engines around them; `trained` may
    be the training before an evaluation, which releases nothing of it.
    """
    if trained is not None:
        trained.ending.close()
    for model in models:
        make_whole(model, ranks_on_host=ranks_on_host, together=together)
    try:
        yield
    finally:
        released = {p: attributes for model in models for p, attributes in release(model).items()}
        for model in models:
            restore_types(model)
        if trained is not None:
            if any(model is trained.engine for model in models):
                trained.released = released
            trained.give_back()
