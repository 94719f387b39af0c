"""Parameters of the model, one by one: as stage 3 divides them, loaded without gathering, by each rank's own pieces; and their master
weights, moments and gradients on all ranks, for `deepspeed.utils.safe_get_full_*` and the like.

Private attributes of a divided parameter: `ds_shape` (of the whole), `ds_tensor` (this rank's piece, flat, with padding),
`ds_process_group` (of the ranks that share it), `partition_numel` (elements of a piece) and `partition`, which drops gathered weights.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    pass


def is_divided(parameter: Any) -> bool:
    """Whether stage 3 has divided a parameter."""
    return hasattr(parameter, "ds_tensor")


def is_in_pieces(module: Module) -> bool:
    """Whether stage 3 has divided the module's parameters."""
    return any(map(is_divided, module.parameters()))


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter, also of one of which this rank has a piece only."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def further_names(module: Module) -> dict[str, str]:
    """Further names of the parameters that have several, each with the first."""
    firsts: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first for name, p in named if (first := firsts.setdefault(id(p), name)) != name}


def piece_of(whole: Tensor, parameter: Any) -> Tensor:
    """This rank's piece of a parameter, [elements of a piece]: a part of `whole`, or a copy with zeros as padding."""
    numel, flat = parameter.partition_numel(), whole.reshape(-1)
    begin = min(dist.get_rank(group=parameter.ds_process_group) * numel, flat.numel())
    part = flat[begin : begin + numel]
    return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])


@torch.no_grad()
def load_pieces(module: Module, states: Mapping[str, Any], pieces: Mapping[str, Tensor], *, strict: bool) -> None:
    """Loads into a divided module, and drops what is gathered of it.

    Args:
        module: the module.
        states: its buffers and extra state; of parameters only the names matter.
        pieces: this rank's piece of each parameter that is to be loaded, [elements of a piece], any type.
        strict: whether `states` must have exactly the module's names.

    Raises:
        RuntimeError: as of `Module.load_state_dict`.
    """
    parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    # A parameter is loaded from itself: torch compares the names.
    module.load_state_dict({name: parameters.get(name, value) for name, value in states.items()}, strict=strict)
    for name, piece in pieces.items():
        parameters[name].partition()
        parameters[name].ds_tensor.copy_(piece)


def load_whole(module: Module, states: Mapping[str, Any], *, strict: bool) -> None:
    """`Module.load_state_dict`, also of a divided module, of which each rank takes its pieces.

    Raises:
        RuntimeError: as of `Module.load_state_dict`.
    """
    if not is_in_pieces(module):
        module.load_state_dict(states, strict=strict)
        return
    named: Any = module.named_parameters()
    pieces = {}
    for name, p in named:
        if name not in states:
            continue
        if tuple(states[name].shape) != tuple(p.ds_shape):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: size mismatch for {name}: the shape must be"
                f" {list(p.ds_shape)}, got {list(states[name].shape)}"
            )
        pieces[name] = piece_of(states[name], p)
    load_pieces(module, states, pieces, strict=strict)
