"""The parameters of a torch optimizer as a `RankPart`: what can be trained, and where each one's state begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Slice, round_up
from lightning_zenflow.core.process import world_size
from lightning_zenflow.core.shards import local_part
from lightning_zenflow.offload.build import RankPart

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class TrainedParameter:
    """One parameter that is trained."""

    name: str
    parameter: Tensor
    group: int
    """Index of its parameter group."""
    number: int
    """Among all parameters of the optimizer, as its state counts them."""


def trained_parameters(param_groups: Sequence[dict[str, Any]]) -> tuple[list[TrainedParameter], dict[str, Tensor]]:
    """The parameters of an optimizer's groups that require gradients, and the others by name. Names are those that it was given."""
    trained, frozen, number = list[TrainedParameter](), dict[str, Tensor](), 0
    for group, values in enumerate(param_groups):
        names = values.get("param_names")
        for index, p in enumerate(values["params"]):
            name = names[index] if names else f"parameter {number}"
            if p.requires_grad:
                trained.append(TrainedParameter(name=name, parameter=p, group=group, number=number))
            else:
                frozen[name] = p
            number += 1
    return trained, frozen


def refuse_unsupported(trained: Sequence[TrainedParameter]) -> None:
    """Raises MisconfigurationException for parameters that would be trained wrongly."""
    if not trained:
        raise MisconfigurationException("OffloadAdamW: some parameter must require gradients, got none that does")
    first = trained[0].parameter
    for of in trained:
        if problem := _problem(of.parameter, first):
            raise MisconfigurationException(f"OffloadAdamW: {of.name}: {problem}")
    if not isinstance(first, DTensor) and world_size() > 1:
        raise MisconfigurationException(
            "OffloadAdamW: with several ranks parameters must be divided by `torch.distributed.fsdp.fully_shard`, got those of one process:"
            " under DistributedDataParallel a gradient is there before the ranks have added it; `fully_shard(module,"
            " reshard_after_forward=False)` is in its place, or train by `ZenFlowStrategy`"
        )
    if not any(local_part(of.parameter).numel() for of in trained):
        raise MisconfigurationException(
            "OffloadAdamW: each rank must have elements of some parameter: train on fewer ranks"
        )


def _problem(parameter: Tensor, first: Tensor) -> str:
    """Why a parameter cannot be trained beside the first one; empty if it can."""
    p = local_part(parameter)
    if isinstance(parameter, DTensor) and isinstance(first, DTensor):
        mesh, (placement, *_) = parameter.device_mesh, parameter.placements
        if mesh.ndim > 1 or mesh.size() != world_size() or mesh != first.device_mesh:
            return f"all parameters must be divided over one mesh, of one dimension, of all {world_size()} ranks, got {mesh}"
        if type(placement) is not Shard:
            return f"it must be divided by `fully_shard`, got the placement {placement}"
        if p.device.type != mesh.device_type:
            return f"it must be on its mesh's {mesh.device_type}, got {p.device}: leave out `CPUOffloadPolicy`"
    elif isinstance(parameter, DTensor) or isinstance(first, DTensor):
        return "all parameters must be DTensors, or none, got some of both"
    if p.layout != torch.strided or p.dtype not in _TYPES:
        return f"it must be dense and of {', '.join(map(str, _TYPES))}, got {p.layout}, {p.dtype}"
    if p.dtype != first.dtype or p.device != first.device:
        return f"all must be of one type and device, got {p.dtype} on {p.device} beside {first.dtype} on {first.device}"
    return "" if p.is_contiguous() else f"its memory must be contiguous, got strides {p.stride()}"


def rank_part(trained: Sequence[TrainedParameter]) -> RankPart:
    """The part of a rank, each parameter or local shard a partition of its own, in the parameter's memory. Shapes are those of the shards.

    The optimizer of the part is AdamW of torch over float32 copies, whose memory the arena replaces; its groups are the single parameters.
    """
    # Not `detach`: a flush in backward writes the same bits again, which is no write of the user's.
    locals_ = [local_part(of.parameter).data for of in trained]
    weights = [w.view(-1) for w in locals_]
    masters = [nn.Parameter(w.to("cpu", torch.float32, copy=True)) for w in weights]
    slices, begin = [], 0
    for number, (shape, w) in enumerate(zip((w.shape for w in locals_), weights, strict=True)):
        if w.numel():
            slices.append(Slice.of(shape, parameter=number, param_group=number, begin=begin, start=0, numel=w.numel()))
        begin = round_up(begin + w.numel())
    return RankPart(
        optimizer=torch.optim.AdamW([{"params": [master]} for master in masters]),
        groups=[{of.name: of.parameter for of in trained}],
        shapes={of.name: w.shape for of, w in zip(trained, locals_, strict=True)},
        masters=masters,
        slices=slices,
        weights=weights,
        device=weights[0].device,
        group=first.device_mesh.get_group() if isinstance(first := trained[0].parameter, DTensor) else None,
    )
