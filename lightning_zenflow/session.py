"""One model's training under ZenFlow on one rank: what the Trainer's strategy and Fabric's do alike."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zenflow.checkpoint.collective import load_together, save_together
from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.core.distributed import in_common
from lightning_zenflow.core.overrides import missing_overrides
from lightning_zenflow.telemetry.tracing import Lane
from lightning_zenflow.worker.process import WorkerError
from lightning_zenflow.zero.config import refuse_options, says_bucket_size, set_bucket_size
from lightning_zenflow.zero.config_sources import ConfigSource, resolve_config
from lightning_zenflow.zero.engine import optimizer_of, zenflow_optimizer
from lightning_zenflow.zero.environment import rank_resources
from lightning_zenflow.zero.lost_ranks import LostRanks
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.zero.supported import frozen_parameters, refuse_unfrozen
from lightning_zenflow.zero.user_optimizer import refuse_parameters_of_no_module

Built = TypeVar("Built", bound=tuple[Any, ...])


class Session:
    """Life of the optimizer, from the set-up of the engine to the end of the worker.

    A set-up replaces the one before it; what has been closed stays readable.

    Args:
        config: source of the keys that are not in `given`, in any form that `resolve_config` reads; None: the environment variable by
            which Lightning takes a DeepSpeed configuration, if it is set.
        given: keys of `ZenFlowConfig`.
        options: keywords of Lightning's strategy.
        strategy: the strategy's class.
        base: Lightning's, which it extends.

    Attributes:
        config: the validated configuration; after a set-up, the one of this training (see `ZenFlowConfig.without_measurements`).
        deepspeed_config: the DeepSpeed configuration of the source; None if it has none.
        optimizer: the optimizer of the present or last set-up; None before the first.

    Raises:
        ConfigValueError: a key has a value that is not allowed.
        MisconfigurationException: a keyword is unknown; `config` cannot be read.
        RuntimeError: this version of Lightning lacks a method that the strategy overrides.
    """

    def __init__(
        self,
        config: ConfigSource,
        given: Mapping[str, Any],
        options: Mapping[str, Any],
        strategy: type,
        base: type,
    ) -> None:
        if missing := missing_overrides(strategy, base):
            raise RuntimeError(
                f"lightning_zenflow cannot extend {base.__module__}.{base.__name__} of lightning {lightning.__version__} (missing there:"
                f" {missing}); it is tested with 2.6.6: install that version or a newer lightning-zenflow"
            )
        if config is None:
            config = os.environ.get(base.DEEPSPEED_ENV_VAR)  # type: ignore[attr-defined]  # Lightning's strategies have it
        check_keys(options, (*KEYS, *inspect.signature(base).parameters), "ZenFlowStrategy")
        refuse_options(options, base)
        self._given_config, self.deepspeed_config = resolve_config(config, given)
        self.config = self._given_config
        self.optimizer: ZenFlowZeroOptimizer | None = None
        self._chooses_buckets = "reduce_bucket_size" not in options and not says_bucket_size(self.deepspeed_config)
        self._frozen_at_setup: dict[str, Tensor] = {}
        self._torch_threads: int | None = None
        self._lost_ranks: LostRanks | None = None

    def set_up(
        self,
        initialize: Callable[[], Built],
        *,
        model: Module,
        optimizer: Optimizer | None,
        deepspeed_config: dict[str, Any],
        device: torch.device,
        ranks_on_host: int,
        node: int,
    ) -> Built:
        """Builds the engine with ZenFlow's optimizer; all ranks call it together.

        Args:
            initialize: calls ``deepspeed.initialize``; the engine is the first item of its result.
            model: the model to train.
            optimizer: the user's; None: the DeepSpeed configuration has one.
            deepspeed_config: what `initialize` gives to DeepSpeed; the bucket size is set in it.
            device: this rank's.
            ranks_on_host: ranks that share the host's memory.
            node: number of this rank's node, for messages.

        Raises:
            MisconfigurationException: ZenFlow does not support the model, the optimizer or the configuration, or they do not fit the host's
                memory.
            ConfigValueError: a key contradicts torch's deterministic algorithms.
            WorkerError: the worker did not start.
            RuntimeError: another rank has failed, whose error is in the message.
        """
        self.config = _repeatable(self._given_config)
        self._lost_ranks = LostRanks(node)
        resources = rank_resources(self.config, device, ranks_on_host=ranks_on_host)
        if device.type == "cpu":
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(min(resources.cores.trainer_threads, self._torch_threads))
        if optimizer is not None:
            refuse_parameters_of_no_module(optimizer, model)
            self._frozen_at_setup = frozen_parameters(model.named_parameters(), optimizer.param_groups)
        if self._chooses_buckets:
            set_bucket_size(deepspeed_config, model)
        with zenflow_optimizer(partial(ZenFlowZeroOptimizer, zenflow=self.config, resources=resources), model):
            built = initialize()
            self.optimizer = optimizer_of(built[0])
        return built

    def begin_micro_batch(self) -> None:
        """Before a forward pass in training: makes the state exact after an interrupted step; the first one of a step follows changes of
        `requires_grad`.

        Raises:
            MisconfigurationException: a parameter that was frozen at setup is not any more.
        """
        if self.optimizer is None:
            return
        if self.optimizer.zenflow_step.was_interrupted:
            self.flush()
        if self.optimizer.zenflow_step.micro_batches == 0:
            refuse_unfrozen(self._frozen_at_setup)
            self.optimizer.zenflow_step.follow_freezing()

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next step belongs to; counts where `select_strategy` is "epoch"."""
        if self.optimizer is not None:
            self.optimizer.zenflow_step.start_epoch(epoch)

    def backward(self) -> AbstractContextManager[None]:
        """Context of the backward pass of a micro-batch."""
        if self.optimizer is not None:
            self.optimizer.zenflow_step.begin_backward(last=self.optimizer.is_gradient_accumulation_boundary())
        return self.span("backward")

    def span(self, lane: Lane) -> AbstractContextManager[None]:
        """Context that the timeline shows."""
        return nullcontext() if self.optimizer is None else self.optimizer.telemetry.tracer.span(lane)

    def flush(self) -> None:
        """Makes weights and optimizer states exact. After a training that ended with an exception, weights stay as they are."""
        if self.optimizer is not None and not self.optimizer.closed:
            with self.explained():
                self.optimizer.flush()

    def save(self, path: Path, write: Callable[[Path], None], *, is_global_zero: bool) -> None:
        """Saves the exact state after the last step, atomically; as `save_together`.

        Raises:
            WorkerError: the exact state is lost, or an exception has interrupted the ranks in different steps.
        """
        with self.explained():
            if self.optimizer is not None:
                self.optimizer.flush()
                if not in_common([self.optimizer.zenflow_step.number]):
                    raise WorkerError(
                        "an exception has interrupted the ranks in different steps: there is no exact state of all of them; continue from"
                        " the last checkpoint"
                    )
            save_together(path, write, is_global_zero=is_global_zero, sync=self.config.sync_checkpoints)

    def load(self, engine: Any, path: Path, *, strict: bool, optimizer_states: bool = True) -> dict[str, Any]:
        """Loads model and optimizer; as `load_together`."""
        assert self.optimizer is not None
        # Before the engine loads weights, which updates in flight would overwrite.
        with self.explained():
            self.optimizer.flush()
            return load_together(engine, self.optimizer, path, strict=strict, optimizer_states=optimizer_states)

    def explain(self, error: BaseException) -> None:
        """Adds to an error of the communication between ranks which ones are lost."""
        if self._lost_ranks is not None:
            self._lost_ranks.explain(error)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context whose errors are explained."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    def close(self) -> None:
        """Ends the worker. May be called again."""
        if self.optimizer is not None:
            # More than `close`: DeepSpeed's engine outlives the training, and its hooks would keep the arena alive.
            self.optimizer.destroy()
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = None


def _repeatable(config: ZenFlowConfig) -> ZenFlowConfig:
    """The configuration of a training: where the user asks torch for runs that repeat, nothing that changes numbers is measured.

    Memory that is measured decides only where gradients and states are, which changes no bit.
    """
    # `Trainer(deterministic=...)` sets it as well.
    if not (config.measures and torch.are_deterministic_algorithms_enabled()):
        return config
    fixed = config.without_measurements()
    rank_zero_info(
        f"ZenFlow: torch's deterministic algorithms are on, so that runs must repeat: update_interval={fixed.update_interval},"
        f" publish_lag={fixed.publish_lag}, no tail, and no measured time changes them. Steps wait for the CPU where its work does not hide"
        " behind training; then set update_interval and publish_lag to larger values"
    )
    return fixed
