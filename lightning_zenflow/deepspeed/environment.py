"""A rank's process around DeepSpeed's engines: the CPU as accelerator, the devices' names, the process group, seeds and variables."""

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import groups
from lightning.fabric.strategies import DeepSpeedStrategy as FabricsStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as TrainersStrategy
from torch.distributed import distributed_c10d
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import one_at_a_time, refuse_inherited_group, variables

Strategy: TypeAlias = FabricsStrategy | TrainersStrategy
"""Lightning's."""

CPU = torch.device("cpu")
"""The device of every rank on a CPU: `module.to` with an index would give weights other memory."""

_SEED = "PL_GLOBAL_SEED"
"""Lightning's variable for the seed of `seed_everything`."""


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


def refuse_prompt(n_ranks: int) -> None:
    """Refuses several ranks in a notebook or at Python's prompt, which Lightning recognises so, too."""
    if hasattr(sys, "ps1") or bool(sys.flags.interactive):
        # Lightning's own error advises a strategy that does not offload.
        raise MisconfigurationException(
            f"ZenFlowStrategy: in a notebook or at Python's prompt devices must be 1, got {n_ranks}: other processes need a file to run;"
            " write one (`%%writefile train.py`) and run it (`!python train.py`)"
        )


def named_devices(devices: Sequence[torch.device] | None) -> list[torch.device]:
    """The devices of a host's ranks. Lightning leaves CPU devices without index; its check, like DeepSpeed's, expects the local rank."""
    devices = devices or []
    is_cpu = all(device.type == "cpu" for device in devices)
    return [torch.device("cpu", rank) for rank in range(len(devices))] if is_cpu else list(devices)


def named_device(device: torch.device) -> torch.device:
    """A rank's device by the name that its tensors have."""
    return CPU if device.type == "cpu" else device


class RankProcess:
    """What a strategy has changed in the process of its rank, from the set-up of Lightning's environment to the end."""

    def __init__(self) -> None:
        self._put_variables_back: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has changed nothing."""
        return {"_put_variables_back": None}

    @one_at_a_time()
    def set_up(self, strategy: Strategy, lightnings: ModuleType, set_up: Callable[[], None], *, is_alone: bool) -> None:
        """Prepares accelerator and process group.

        Args:
            strategy: whose environment is set up.
            lightnings: module of Lightning with the strategies that it extends.
            set_up: the method of its base class.
            is_alone: whether there is one rank, which has all batches and whose seeds are as under ``strategy="auto"``.

        Raises:
            RuntimeError: this process was forked from one with a process group.
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
        strategy.parallel_devices = named_devices(strategy.parallel_devices)
        if strategy.root_device.type == "cpu":
            use_cpu_accelerator()
            # Lightning's `DeepSpeedStrategy` only refuses the CPU.
            set_up = partial(lightnings.DDPStrategy.setup_environment, strategy)
        with _as_one_device(lightnings.DeepSpeedStrategy.__module__) if is_alone else nullcontext():
            set_up()
        if (timeout := strategy._timeout) is not None:
            # Private: all of ZeRO's collectives use this group, which DeepSpeed makes with torch's default timeout of 30 minutes; torch
            # before 2.14 has no public way to change it.
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
    without a line in the log; its later advice on several devices is not shown.

    Args:
        log: its name.
    """
    advice = r"It is recommended to use `self\.log\(.*, sync_dist=True\)`"
    warnings.filterwarnings("ignore", advice)
    seed = os.environ.pop(_SEED, None)
    logger, says_nothing = logging.getLogger(log), lambda record: False
    logger.addFilter(says_nothing)
    try:
        yield
    finally:
        logger.removeFilter(says_nothing)
        if seed is not None:
            os.environ[_SEED] = seed
