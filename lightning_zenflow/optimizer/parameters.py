"""The parameters of a torch optimizer as a `RankPart`: what can be trained, and where each one's state begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Slice, align
from lightning_zenflow.offload.build import RankPart

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One parameter that is trained."""

    name: str
    parameter: Tensor
    group: int
    """Index of its parameter group."""


def trained_parameters(param_groups: Sequence[dict[str, Any]]) -> tuple[list[Trained], dict[str, Tensor]]:
    """The parameters of an optimizer's groups that require gradients, and the others by name. Names are those that it was given."""
    trained, frozen, number = list[Trained](), dict[str, Tensor](), 0
    for group, values in enumerate(param_groups):
        names = values.get("param_names") or [f"parameter {number + i}" for i in range(len(values["params"]))]
        number += len(names)
        for name, p in zip(names, values["params"], strict=True):
            if p.requires_grad:
                trained.append(Trained(name=name, parameter=p, group=group))
            else:
                frozen[name] = p
    return trained, frozen


def refuse_unsupported(trained: Sequence[Trained]) -> None:
    """Raises MisconfigurationException for parameters that would be trained wrongly."""
    if not trained:
        raise MisconfigurationException("OffloadAdamW: some parameter must require gradients, got none that does")
    first = trained[0].parameter
    for of in trained:
        p = of.parameter
        problem = ""
        if isinstance(p, DTensor):
            problem = "it must be whole on its device, got a DTensor: use `ZenFlowStrategy` or DeepSpeed's ZeRO for several devices"
        elif p.layout != torch.strided or p.dtype not in _TYPES:
            problem = f"it must be dense and of {', '.join(map(str, _TYPES))}, got {p.layout}, {p.dtype}"
        elif p.dtype != first.dtype or p.device != first.device:
            problem = f"all must be of one type and device, got {p.dtype} on {p.device} beside {first.dtype} on {first.device}"
        elif not p.is_contiguous():
            problem = f"its memory must be contiguous, got strides {p.stride()}"
        if problem:
            raise MisconfigurationException(f"OffloadAdamW: {of.name}: {problem}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise MisconfigurationException(
            "OffloadAdamW: parameters must be those of one process, got several ranks: under DistributedDataParallel a gradient is there"
            " before the ranks have added it; train by `ZenFlowStrategy`, whose ranks divide the optimizer's state"
        )


def rank_part(trained: Sequence[Trained]) -> RankPart:
    """The part of one rank that has all of the parameters, each a partition of its own, in the parameter's memory.

    The optimizer of the part is AdamW of torch over float32 copies, whose memory the arena replaces; its groups are the single parameters.
    """
    # Not `detach`: a flush in backward writes the same bits again, which is no write of the user's.
    weights = [of.parameter.data.view(-1) for of in trained]
    masters = [nn.Parameter(w.to("cpu", torch.float32, copy=True)) for w in weights]
    slices, begin = [], 0
    for number, (of, w) in enumerate(zip(trained, weights, strict=True)):
        if w.numel():
            shape = of.parameter.shape
            slices.append(Slice.of(shape, parameter=number, param_group=number, begin=begin, start=0, numel=w.numel()))
        begin = align(begin + w.numel())
    return RankPart(
        optimizer=torch.optim.AdamW([{"params": [master]} for master in masters]),
        groups=[{of.name: of.parameter for of in trained}],
        shapes={of.name: of.parameter.shape for of in trained},
        masters=masters,
        slices=slices,
        weights=weights,
        device=weights[0].device,
        group=None,
    )
