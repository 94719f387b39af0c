"""What Lightning's plugins are around DeepSpeed's engines: the CPU as accelerator, a rank's devices, process group and variables, and the
precision, with types of weights and batches as under Lightning's other strategies, and what `torch.autocast` lacks.
"""

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import groups
from lightning.fabric.strategies import DeepSpeedStrategy as FabricsStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as TrainersStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import Library
from torch.nn import Module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import one_at_a_time, refuse_inherited_group, variables

if TYPE_CHECKING:
    from lightning.fabric.plugins import DeepSpeedPrecision
else:
    # Lightning has this class three times, for Fabric and for each of its Trainers: each front's is a subclass of one of them.
    DeepSpeedPrecision = object

Strategy: TypeAlias = FabricsStrategy | TrainersStrategy
"""Lightning's."""

CPU = torch.device("cpu")
"""The device of every rank on a CPU: `module.to` with an index would give weights other memory."""


class CpuAccelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's CPU accelerator without what needs more than torch."""

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
        """None for shared-memory collectives, which serve inference only and need a compiler and a minute."""
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)


def use_cpu_accelerator() -> None:
    """Makes DeepSpeed train on the CPU. It chooses one accelerator per process, and CUDA where there is a device."""
    if not isinstance(get_accelerator(), CpuAccelerator):
        set_accelerator(CpuAccelerator())


class RankProcess:
    """What a strategy has changed in the process of its rank, from the set-up of Lightning's environment to the end."""

    def __init__(self) -> None:
        self._put_variables_back: Callable[[], object] | None = None

    @one_at_a_time()
    def set_up(self, strategy: Strategy, lightnings: ModuleType, set_up: Callable[[], None], *, is_alone: bool) -> None:
        """Prepares accelerator and process group of a strategy; `lightnings` is Lightning's module with its base class, whose method is
        `set_up`. With `is_alone` seeds are as under ``strategy="auto"``.
        """
        refuse_inherited_group()
        # With several ranks, Lightning's launcher reads from them in a further fit that the other ranks have been started.
        if is_alone and self._put_variables_back is None:
            self._put_variables_back = weakref.finalize(self, variables.begin())
        # Private: DeepSpeed forgets its groups only in its own `destroy_process_group`, and would not make new ones for the next engine;
        # Lightning and users call torch's. `_world.pg_map` has the groups that torch has not destroyed; torch has no public list of them.
        group = groups._WORLD_GROUP
        if group is not None and group not in distributed_c10d._world.pg_map:
            groups._release_process_group_references()
        devices = strategy.parallel_devices or []
        if strategy.root_device.type == "cpu":
            use_cpu_accelerator()
            # Lightning's `DeepSpeedStrategy` only refuses the CPU.
            set_up = partial(lightnings.DDPStrategy.setup_environment, strategy)
            # Its check expects the local rank as index.
            strategy.parallel_devices = [torch.device("cpu", rank) for rank in range(len(devices))]
        with _as_one_device(lightnings.DeepSpeedStrategy.__module__) if is_alone else nullcontext():
            set_up()
        if strategy.root_device.type == "cpu":
            strategy.parallel_devices = [CPU] * len(devices)
        if (timeout := strategy._timeout) is not None:
            # Private: all of ZeRO's collectives use this group, with torch's default timeout; before 2.14 torch has no public setter.
            set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
            set_timeout(timeout, groups._clone_world_group())

    def end(self) -> None:
        """Puts the variables back, so that child processes do not take themselves for ranks of the former training."""
        if self._put_variables_back is not None:
            self._put_variables_back()
            self._put_variables_back = None


@contextmanager
def _as_one_device(log: str) -> Iterator[None]:
    """Context in which Lightning sets up the group of a single rank without seeding again, which its strategies for one device do not, and
    without a line in the `log`; its later advice on several devices is not shown.
    """
    warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*, sync_dist=True\)`")
    # Of `seed_everything`.
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    try:
        with patch.object(logging.getLogger(log), "disabled", True):
            yield
    finally:
        if seed is not None:
            os.environ["PL_GLOBAL_SEED"] = seed


_types: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()
"""Of parameters and buffers that are float32 for as long as their module is trained."""


def restore_types(module: Module) -> None:
    """Gives parameters and buffers of a module the types that they had before `convert_module`, after training."""
    for tensor in (*module.parameters(), *module.buffers()):
        if (before := _types.get(tensor)) is not None:
            tensor.data = tensor.data.to(before)
            del _types[tensor]


_WIDENED: dict[str, tuple[int, ...]] = {
    "batch_norm": (1, 2), "instance_norm": (1, 2), "layer_norm": (2, 3), "group_norm": (2, 3),
    "addmv": (0, 1, 2), "bilinear": (0, 1, 2, 3), "lerp.Tensor": (0, 1, 2), "embedding_bag.padding_idx": (0, 6),
    **dict.fromkeys(("dot", "inner", "linalg_cross", "mv", "tensordot", "vdot", "lerp.Scalar"), (0, 1)),
    # What is written into another tensor; each also in place.
    **{f"{name}{end}": (2,) for name in ("index_put", "masked_scatter") for end in ("", "_")},
    **{f"{name}{end}": (3,) for name in ("index_add", "index_copy", "index_reduce", "scatter_add") for end in ("", "_")},
    **{f"scatter{end}": (3,) for end in (".src", "_.src", "_reduce.two", "_reduce_.two")},
}  # fmt: skip
"""Operation of torch -> places of the arguments that become float32 where another one is."""


@cache
def complete_autocast(device: str) -> Library:
    """Makes these operations run under `torch.autocast` on a type of device with arguments of 16 bits beside float32, as with all of them
    in float32. Torch has an error there, or a rule of its own, which stays. For the life of the process.
    """
    library, key = Library("aten", "IMPL"), f"Autocast{device.upper()}"  # type: ignore[no-untyped-call]
    for name, places in _WIDENED.items():
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        # Private: torch has no public question for its own rules.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            run = partial(_widened, operation, places, device)
            library.impl(operation, run, key)  # type: ignore[no-untyped-call]
    return library


def _widened(operation: Any, places: tuple[int, ...], device: str, *args: Any, **keywords: Any) -> Any:
    types = [getattr(arg, "dtype", None) for arg in args]
    short = [i for i in places if i < len(args) and types[i] in (torch.bfloat16, torch.float16)]
    widened = short if torch.float32 in types else []
    # Without autocast: the operation would come here again.
    with torch.autocast(device, enabled=False):
        return operation(*(arg.float() if i in widened else arg for i, arg in enumerate(args)), **keywords)


class PlainPrecision(DeepSpeedPrecision):
    """Leaves what a model gets, and gives, as it is with "32-true": float64 stays float64."""

    @override
    def convert_module(self, module: Module) -> Module:
        """With "32-true", buffers and frozen parameters keep their types; trained ones become float32, as their master weights are, and
        so do those with a fraction that are in one module with them, and buffers of 16 bits there, until `restore_types`.
        """
        if self.precision != "32-true":
            return super().convert_module(module)
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
            return super().forward_context()
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        complete_autocast(device := get_accelerator().device_name())
        return torch.autocast(device, dtype=dtype, cache_enabled=False)


def own_precision(plugin: Any, ours: type[Any]) -> Any:
    """The plugin that a strategy has for Lightning's or the user's (or None); `ours`: subclass of Lightning's precision for DeepSpeed."""
    lightnings: type[Any] = ours.__bases__[-1]
    if not isinstance(plugin, lightnings | None):
        raise MisconfigurationException(
            f"ZenFlowStrategy: a precision plugin must be a {lightnings.__name__}, got {type(plugin).__name__}: set `precision`"
            " instead, without a plugin"
        )
    # A user's own subclass stays.
    return ours(plugin.precision) if plugin is not None and type(plugin) is lightnings else plugin
