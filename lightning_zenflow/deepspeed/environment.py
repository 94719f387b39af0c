"""Environment of a rank: accelerator, devices, cores, and the variables by which ranks find each other.

`RankEnvironment` has the hooks of Lightning's life cycle that both strategies share.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import groups
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch.distributed import distributed_c10d
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.distributed import raising_together
from lightning_zenflow.core.errors import OtherBases
from lightning_zenflow.worker.machine import (
    WorkerCores,
    free_host_memory,
    places_on_this_host,
    read_place,
    worker_cores,
)


@dataclass(frozen=True, kw_only=True)
class RankResources:
    """Host resources of one rank."""

    cores: WorkerCores
    """Cores of the worker."""
    ranks_on_host: int
    """Ranks that share the host's memory."""
    word_timeout_s: float
    """Limit of the worker's wait for a word: that of the collectives which the word is behind, at least `worker_timeout`."""


def rank_resources(
    config: ZenFlowConfig, device: torch.device, *, ranks_on_host: int, world_size: int, timeout: timedelta | None
) -> RankResources:
    """Chooses the worker's cores; all ranks call it together.

    Args:
        config: configuration.
        device: of the rank.
        ranks_on_host: see `RankResources`.
        world_size: number of ranks.
        timeout: limit of a collective; None: torch's default.

    Raises:
        ValueError: this or another rank may not use the cores that `worker_cores` asks for, or its `HOST_MEMORY` is wrong.
    """
    places, index = places_on_this_host(read_place(device))
    with raising_together(ValueError):
        free_host_memory()  # Refuses a wrong value of its environment variable.
        cores = worker_cores(
            config.worker_cores, places=places, index=index, reserved_share=config.pt_reserved_cores_perc
        )
    # With one rank a word waits for the device alone.
    collective_s = (timeout or default_pg_timeout).total_seconds() if world_size > 1 else 0.0
    # Less than the 32 bits of milliseconds that `worker_timeout` has too.
    word_timeout_s = max(config.worker_timeout, min(collective_s, 1e6))
    return RankResources(cores=cores, ranks_on_host=ranks_on_host, word_timeout_s=word_timeout_s)


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


_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""By which ranks find each other: Lightning's launcher and DeepSpeed set them for a training and leave them behind."""

_SEED = "PL_GLOBAL_SEED"
"""Lightning's variable for the seed of `seed_everything`."""


class RankEnvironment(OtherBases):  # type: ignore[misc]
    """Mixin of a `DeepSpeedStrategy`, Fabric's or the Trainer's: it runs on CPUs too, and in one process without a launcher."""

    deepspeed_strategy: ClassVar[type[Any]]
    """Lightning's class that the strategy extends."""
    _variables_before: dict[str, str | None] | None = None
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
        # The launcher runs before all other hooks and is the first to change them.
        self._variables_before = {name: os.environ.get(name) for name in _VARIABLES}
        # One process launches nothing. Lightning refuses launchers in notebooks, also where they would start no process.
        if not self.is_alone:
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        """Prepares accelerator and process group."""
        with _as_one_device(self.deepspeed_strategy) if self.is_alone else nullcontext():
            self._set_up_group()

    def _set_up_group(self) -> None:
        # Private: DeepSpeed forgets its groups only in its own `destroy_process_group`, and would not make new ones for the next engine;
        # Lightning and users call torch's. `_world.pg_map` has the groups that torch has not destroyed; torch has no public list of them.
        group = groups._WORLD_GROUP
        if group is not None and group not in distributed_c10d._world.pg_map:
            groups._release_process_group_references()
        if self.accelerator.name() == "cpu":
            # DeepSpeed chooses one accelerator per process, and CUDA where there is a device.
            if not isinstance(get_accelerator(), CpuAccelerator):
                set_accelerator(CpuAccelerator())
            # Skips DeepSpeedStrategy's own method, which only refuses the CPU.
            super(self.deepspeed_strategy, self).setup_environment()
        else:
            super().setup_environment()
        if self._timeout is not None:
            # Private: all of ZeRO's collectives use this group, which DeepSpeed makes with torch's default timeout of 30 minutes; torch
            # before 2.14 has no public way to change it.
            set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
            set_timeout(self._timeout, groups._clone_world_group())

    @override
    def teardown(self) -> None:
        """Lightning's teardown; child processes do not take themselves for ranks of the former training."""
        super().teardown()
        # With several ranks, Lightning's launcher reads from them in a further fit that the other ranks have been started.
        if self._variables_before is not None and self.is_alone:
            for name, value in self._variables_before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


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
