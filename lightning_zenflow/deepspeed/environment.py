"""What is around DeepSpeed's engines. Mixins of Lightning's classes for DeepSpeed: of its strategy, which then runs on CPUs too and in one
process without a launcher; and of its precision plugin, with batches, clipping and closures as under Lightning's other strategies. And the
engines' construction: with ZenFlow's optimizer in the place of DeepSpeed's, and of a model that is not trained.
"""

import argparse
import io
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import groups
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn import Module, Parameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_zenflow.core.autocast import complete_autocast
from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.core.process import one_at_a_time, refuse_inherited_group, variables
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.removal import note_users_flags, remove_hooks


class CpuAccelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's CPU accelerator without its shared-memory collectives, which serve inference only and need a compiler and a minute."""

    @override
    def is_fp16_supported(self) -> bool:
        """True: torch computes fp16 on every CPU. DeepSpeed asks for fast instructions, and refuses fp16 where there are none."""
        return True

    @override
    def device_count(self) -> int:
        """1: each rank has one. DeepSpeed asks `numactl` in every step, and fails where the user may not read a folder of PATH."""
        return 1

    @override
    def create_op_builder(self, op_name: str) -> Any:
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)


def use_cpu_accelerator() -> None:
    """Makes DeepSpeed train on the CPU. It chooses one accelerator per process, and CUDA where there is a device."""
    if not isinstance(get_accelerator(), CpuAccelerator):
        set_accelerator(CpuAccelerator())


_SEED = "PL_GLOBAL_SEED"
"""Lightning's variable for the seed of `seed_everything`."""


class RankEnvironment(OtherBases):  # type: ignore[misc]
    """Mixin of a `DeepSpeedStrategy`, Fabric's or the Trainer's: hooks of Lightning's life cycle that both share."""

    deepspeed_strategy: ClassVar[type[Any]]
    """Lightning's class that the strategy extends."""
    _put_variables_back: Callable[[], object] | None = None
    _cpu = torch.device("cpu", 0)
    """With the index that DeepSpeed's set-up asks for."""

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, which has all batches and whose seeds are as under ``strategy="auto"``."""
        return bool(self.num_nodes * self.num_processes == 1)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this host's ranks, in order of local rank."""
        devices: list[torch.device] | None = self._parallel_devices
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and all(device.type == "cpu" for device in devices):
            # Lightning leaves CPU devices without index; its check, like DeepSpeed's, expects the local rank there.
            devices = [torch.device("cpu", rank) for rank in range(len(devices))]
        self._parallel_devices = devices

    @property
    @override
    def root_device(self) -> torch.device:
        """This rank's device; the CPU has one name for every rank."""
        device: torch.device = super().root_device
        return self._cpu if device.type == "cpu" else device

    @override
    def _configure_launcher(self) -> None:
        # One process launches nothing. Lightning refuses launchers in notebooks, also where they would start no process.
        if not self.is_alone:
            super()._configure_launcher()

    @override
    @one_at_a_time()
    def setup_environment(self) -> None:
        """Prepares accelerator and process group.

        Raises:
            RuntimeError: this process was forked from one with a process group.
        """
        refuse_inherited_group()
        # With several ranks, Lightning's launcher reads from them in a further fit that the other ranks have been started.
        if self.is_alone and self._put_variables_back is None:
            self._put_variables_back = weakref.finalize(self, variables.begin())
        # Private: DeepSpeed forgets its groups only in its own `destroy_process_group`, and would not make new ones for the next engine;
        # Lightning and users call torch's. `_world.pg_map` has the groups that torch has not destroyed; torch has no public list of them.
        group = groups._WORLD_GROUP
        if group is not None and group not in distributed_c10d._world.pg_map:
            groups._release_process_group_references()
        behind: type[Any] = RankEnvironment
        if self.accelerator.name() == "cpu":
            use_cpu_accelerator()
            # Skips DeepSpeedStrategy's own method, which only refuses the CPU.
            behind = self.deepspeed_strategy
        with _as_one_device(self.deepspeed_strategy) if self.is_alone else nullcontext():
            super(behind, self).setup_environment()
        if self._timeout is not None:
            # Private: all of ZeRO's collectives use this group, which DeepSpeed makes with torch's default timeout of 30 minutes; torch
            # before 2.14 has no public way to change it.
            set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
            set_timeout(self._timeout, groups._clone_world_group())

    @override
    def teardown(self) -> None:
        """Lightning's teardown; child processes do not take themselves for ranks of the former training."""
        super().teardown()
        if self._put_variables_back is not None:
            self._put_variables_back()
            self._put_variables_back = None


@contextmanager
def _as_one_device(lightnings: type[Any]) -> Iterator[None]:
    """Context in which Lightning sets up the group of a single rank without seeding again, which its strategies for one device do not, and
    without a line in the log; its later advice on several devices is not shown.

    Args:
        lightnings: its strategy.
    """
    advice = r"It is recommended to use `self\.log\(.*, sync_dist=True\)`"
    warnings.filterwarnings("ignore", advice)
    seed = os.environ.pop(_SEED, None)
    log, says_nothing = logging.getLogger(lightnings.__module__), lambda record: False
    log.addFilter(says_nothing)
    try:
        yield
    finally:
        log.removeFilter(says_nothing)
        if seed is not None:
            os.environ[_SEED] = seed


_types: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()
"""Of parameters and buffers that are float32 for as long as their module is trained."""


def restore_types(module: Module) -> None:
    """Gives parameters and buffers of a module the types that they had before `convert_module`, after training."""
    for tensor in (*module.parameters(), *module.buffers()):
        if (before := _types.get(tensor)) is not None:
            tensor.data = tensor.data.to(before)
            del _types[tensor]


class PlainPrecision(OtherBases):  # type: ignore[misc]
    """Leaves what a model gets, and gives, as it is with "32-true": float64 stays float64."""

    @override
    def convert_module(self, module: Module) -> Module:
        """With "32-true", buffers and frozen parameters keep their types; trained ones become float32, as their master weights are, and
        so do those with a fraction that are in one module with them, and buffers of 16 bits there, until `restore_types`.
        """
        if self.precision != "32-true":
            converted: Module = super().convert_module(module)
            return converted
        others = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        trained = {parameter for _, parameter in others}
        for part in module.modules():
            own = [p for p in part.parameters(recurse=False) if p.is_floating_point()]
            if not trained.isdisjoint(own):
                # Parametrizations are modules of their own.
                buffers = part.buffers(recurse=isinstance(part, ParametrizationList))
                for tensor in (*own, *(b for b in buffers if b.dtype in (torch.bfloat16, torch.float16))):
                    _types.setdefault(tensor, tensor.dtype)
                    tensor.data = tensor.data.float()
        if others:
            rank_zero_info(
                f"ZenFlow: {len(others)} trained parameters are float32 in training with precision='32-true', {others[0][0]} the first;"
                " freeze them to keep their types, or set another precision"
            )
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_input(data)

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        """With mixed precision `torch.autocast`, which Fabric's plugin lacks; weights have 16 bits, and buffers their own types."""
        if "mixed" not in self.precision:
            context: AbstractContextManager[None] = super().forward_context()
            return context
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        complete_autocast(device := get_accelerator().device_name())
        return torch.autocast(device, dtype=dtype, cache_enabled=False)


class TrainerPrecision(PlainPrecision):
    """With mixed precision batches stay as they are as well.

    Attributes:
        max_norm: DeepSpeed's `gradient_clipping`, of steps for which the Trainer and the module clip nothing.
        norm_of_step: largest norm of the next step; None: `clip_gradients` has not been called for it.
    """

    max_norm = 0.0
    norm_of_step: float | None = None

    @override
    def convert_input(self, data: Any) -> Any:
        return data if "mixed" in self.precision else super().convert_input(data)

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure, which may have been run before, the hooks between backward and step, and the step.

        Raises:
            MisconfigurationException: something wraps the optimizer.
        """
        if not isinstance(optimizer, ZenFlowOptimizer):
            kind = type(optimizer)
            raise MisconfigurationException(
                f"ZenFlowStrategy: trainer.optimizers must be the strategy's own, got {kind.__module__}.{kind.__qualname__}, whose"
                " `step` is not called: use hooks such as `on_train_batch_end`, or `register_step_post_hook` of the optimizer"
            )
        result = closure()
        # In manual optimization the step's last backward pass may have been any.
        optimizer.training.complete()
        optimizer.clip_grad = self.max_norm if self.norm_of_step is None else self.norm_of_step
        # Private: calls `on_before_optimizer_step` and, by `configure_gradient_clipping`, `clip_gradients`.
        self._after_closure(model, optimizer)
        self.norm_of_step = None
        model.trainer.model.step(**kwargs)
        return result

    @override
    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Sets the largest norm of this step, which may be another one in each step.

        Raises:
            MisconfigurationException: `gradient_clip_algorithm` is not "norm".
        """
        if clip_val > 0:
            if gradient_clip_algorithm != "norm":
                raise MisconfigurationException(
                    f"gradient_clip_algorithm must be 'norm' under ZenFlowStrategy, got {str(gradient_clip_algorithm)!r}"
                )
            # A module may give the Trainer's wrapper of the optimizer.
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            norm = float(clip_val)
            # Who clips twice has clipped to the smaller norm.
            self.norm_of_step = norm if self.norm_of_step is None else min(norm, self.norm_of_step)
            optimizer.clip_grad = self.norm_of_step


@contextmanager
def in_place_of_deepspeeds(
    ours: type[ZenFlowOptimizer], factory: Callable[..., Any], module: Module
) -> Iterator[list[Any]]:
    """Makes ``deepspeed.initialize`` build its optimizer with `factory`; an error in the context destroys the optimizer.

    Private: the engine finds its optimizer's class by a name in a module, and has no other extension point. The name is replaced inside
    this context only.

    Args:
        ours: the class of the stage of ZeRO.
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context. Parameters in another memory format (`torch.channels_last`) are
            contiguous from now on.

    Returns:
        The optimizer, at the end of the context.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    base, namespace = ours.__bases__[-1], ours.namespace
    name = base.__name__
    if vars(namespace).get(name) is not base:
        raise _unsupported("no name to replace")
    built: list[Any] = []
    note_users_flags(module)
    scalars = _lay_out_for_broadcast(module)

    def restore_scalars() -> None:
        for scalar in scalars:
            scalar.data = scalar.data.view(())
        scalars.clear()

    def build(*args: Any, **kwargs: Any) -> Any:
        restore_scalars()
        built.append(factory(*args, **kwargs))
        return built[-1]

    setattr(namespace, name, build)
    try:
        yield built
        if not built:
            raise _unsupported("its engine built another optimizer")
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        for unused in built:
            unused.destroy()
            unused.training.end(keep_state=False)
        raise
    finally:
        restore_scalars()
        setattr(namespace, name, base)


@one_at_a_time()
def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine of a model without optimizer, which converts its weights to the precision of the training's configuration and,
    under stage 3, divides them. Hooks of an engine before are removed; the user's stay.
    """
    remove_hooks(module)
    note_users_flags(module)
    keys = ("fp16", "bf16", *(["zero_optimization"] if config["zero_optimization"]["stage"] == 3 else []))
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in keys if key in config}}
    arguments = argparse.Namespace(device_rank=device.index or 0)
    # In bf16 it prints the memory in use, on six lines.
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            args=arguments, config=settings, model=module, model_parameters=[], dist_init_required=False
        )
    return engine


def _lay_out_for_broadcast(module: Module) -> list[Parameter]:
    """Makes every parameter contiguous, with a dimension at least; returns the scalars, which need their shape back for the optimizer.

    DeepSpeed's engine broadcasts each parameter as a tensor of bytes, which torch makes of such memory only. Its optimizer, which comes
    next, copies all trained parameters into contiguous memory anyway.
    """
    # Stage 3 may have partitioned some before, which have no memory.
    whole = [p for p in module.parameters() if not is_zero_param(p)]
    scalars = [p for p in whole if p.dim() == 0]
    for parameter in whole:
        flat = parameter.data.reshape(-1)
        if flat.stride() != (1,):
            # Not by `contiguous`: it leaves the stride of one element as it is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        parameter.data = flat.view(parameter.shape or (1,))
    return scalars


def _unsupported(what: str) -> RuntimeError:
    return RuntimeError(
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
