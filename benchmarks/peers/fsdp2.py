"""FSDP2 on one rank, with its `CPUOffloadPolicy`, which `ModelParallelStrategy` refuses as it moves weights to the device, or without."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn import ModuleList, Sequential
from typing_extensions import override


class Fsdp2(SingleDeviceStrategy):
    """Weights in the module's type on the device, for an optimizer that offloads. Each item of the module's lists of layers is sharded by
    itself, as FSDP2's tutorial advises.
    """

    def options(self) -> dict[str, Any]:
        """Of `fully_shard`."""
        return {}

    @override
    def model_to_device(self) -> None:
        # Gradients in host memory are clipped by a collective there.
        on_cuda = self.root_device.type == "cuda"
        if not dist.is_initialized():
            backends = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
            dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
        module = self.lightning_module
        assert module is not None
        options = {"mesh": init_device_mesh(self.root_device.type, (1,)), **self.options()}
        for layers in [m for m in module.modules() if isinstance(m, (ModuleList, Sequential))]:
            for layer in layers:
                fully_shard(layer, **options)
        fully_shard(module, **options)
        register_fsdp_forward_method(module, "training_step")
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device, torch.bfloat16)

    @override
    def teardown(self) -> None:
        # As `ModelParallelStrategy`, which leaves the weights where they are: an optimizer may refer to them.
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        dist.destroy_process_group()


class Fsdp2Offload(Fsdp2):
    """Weights in 32 bits, gradients and the optimizer's states in host memory; bf16 weights of a layer on the device while it runs.

    The optimizer steps behind backward.
    """

    @override
    def options(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        # All methods begin with weights that were rounded to 16 bits.
        module.bfloat16().float()
        return {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda"),
        }
