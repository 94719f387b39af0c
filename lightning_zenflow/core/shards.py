"""Local shards of DTensors, as `torch.distributed.fsdp.fully_shard` makes of parameters; other tensors are whole."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in its memory; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # autograd would make a view of the shard
        return tensor.to_local()


def as_shard(local: Tensor, parameter: Tensor) -> Tensor:
    """What `local_part` gives `local` of: divided as `parameter` is, on the device and of the type of `local`."""
    if not isinstance(parameter, DTensor):
        return local
    # Private: the specification, and what FSDP2 calls too. `DTensor.from_local` would copy host memory to the mesh's devices.
    spec = parameter._spec
    assert spec.tensor_meta is not None, "parameters have one"
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's
