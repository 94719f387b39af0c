"""DeepSpeed's engine of one training with ZenFlow's optimizer, from its set-up to the end of the worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zenflow.core.errors import Calls
from lightning_zenflow.core.process import one_at_a_time, threads
from lightning_zenflow.deepspeed.config import Settings, of_one_training, set_bucket_size
from lightning_zenflow.deepspeed.construction import in_place_of_deepspeeds
from lightning_zenflow.deepspeed.environment import Strategy, restore_types
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.deepspeed.users_module import Released, make_whole, pickled_as_before, release
from lightning_zenflow.deepspeed.users_objects import UsersOptimizer
from lightning_zenflow.offload.build import rank_resources
from lightning_zenflow.training import Training


class TrainedEngine:
    """What a set-up makes; all ranks make it together. A front holds that of the present training, or of the last one.

    Args:
        build: builds the engine by ``deepspeed.initialize``.
        model: the model to train.
        optimizer: the user's; None: the DeepSpeed configuration has one.
        strategy: this and what follows are the front's; its `config` is that for `build`.

    Attributes:
        engine: DeepSpeed's.
        training: what its optimizer holds, and the front calls.
        zenflow: keys of this training.
        optimizer: this package's; what has been closed stays readable.
        order: names of the parameters of each group of the user's optimizer.
        released: when training has ended, what saves need of it.
        ending: what ends with the training; it refers to no strategy.

    Raises:
        MisconfigurationException: ZenFlow does not support something, or it does not fit the host's memory.
        WorkerError: the worker did not start.
        RuntimeError: another rank has failed, whose error is in the message.
    """

    @one_at_a_time()
    def __init__(
        self,
        build: Callable[[], DeepSpeedEngine],
        model: Module,
        optimizer: Optimizer | None,
        strategy: Strategy,
        settings: Settings,
        calls: Calls,
    ) -> None:
        self.zenflow, device = of_one_training(settings.zenflow), strategy.root_device
        self.released: list[Released] = []
        frozen: dict[str, Tensor] = {}
        if optimizer is not None:
            named = {id(p): (name, p) for name, p in model.named_parameters()}
            optimized = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            frozen = {name: p for of_group in optimized for name, p in of_group if not p.requires_grad}
            self.order = [[name for name, _ in of_group] for of_group in optimized]
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
                set_bucket_size(strategy.config or {}, model)
            kind: type[ZenFlowOptimizer] = ZenFlowZero3Optimizer if strategy.zero_stage_3 else ZenFlowZeroOptimizer
            self.training = Training(self.zenflow, resources, calls, frozen)
            with in_place_of_deepspeeds(
                kind, partial(kind, training=self.training, users=self._users), model
            ) as optimizers:
                self.engine = build()
            undo.pop_all()
        self.optimizer: ZenFlowOptimizer = optimizers[0]
        if optimizer is None:
            self.order = [list(of_group) for of_group in self.training.shapes_by_group]
        # More than `close`: DeepSpeed's engine outlives the training, and its hooks would keep the arena alive.
        self.ending.callback(self.optimizer.destroy)
        self.ending.enter_context(pickled_as_before([*model.modules(), *model.parameters()]))

    def flush(self) -> None:
        """Makes weights and optimizer states exact; nothing when training has ended. All ranks call it together."""
        if not self.training.closed:
            self.training.flush()

    def give_back(self) -> None:
        """Gives the user's optimizer back, behind the end of the worker; saves go on with what it had in training."""
        users, self._users = self._users, None
        if users is not None:
            users.give_back(has_trained=self.training.steps.number > 0)
            self.optimizer.optimizer = users.optimizer

    def drop_state(self) -> None:
        """Frees the optimizer's state when nothing saves it any more."""
        if self.training.closed:
            self.training.end(keep_state=False)
            self.optimizer.optimizer.state.clear()


def is_elsewhere(trained: TrainedEngine | None) -> bool:
    """Whether this process is a fork of the one that trains, as behind `sys.exit` in a child that a hook has forked."""
    return trained is not None and trained.training.is_elsewhere


@contextmanager
def leaving_engines(
    models: Sequence[Module], trained: TrainedEngine | None, *, ranks_on_host: int, together: bool
) -> Iterator[None]:
    """Context of Lightning's teardown, behind the end of the worker. The modules are then what they were before, with their present
    weights; the user's optimizer has their parameters again, and no state.

    Args:
        models: modules that DeepSpeed has, or the engines around them.
        trained: the present training, or the one before an evaluation, which releases nothing of it.
        ranks_on_host: number of ranks on this host.
        together: whether all ranks call it together, and none because of an error.
    """
    for model in models:
        make_whole(model, ranks_on_host=ranks_on_host, together=together)
    try:
        yield
    finally:
        released = [release(model) for model in models]
        for model in models:
            restore_types(model)
        if trained is not None:
            if any(model is trained.engine for model in models):
                trained.released = released
            trained.give_back()
