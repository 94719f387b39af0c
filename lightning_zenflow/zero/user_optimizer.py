"""The optimizer from `configure_optimizers`: checks that ZenFlow can replace it, and reads its hyperparameters at each step."""

import math
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch.core.optimizer import _MockOptimizer  # private: what Lightning puts in the place of None
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zenflow.core.step_inputs import GroupHyperparameters

_SUPPORTED: dict[type, str] = {
    torch.optim.AdamW: "torch.optim.AdamW",
    torch.optim.Adam: "torch.optim.Adam",
    DeepSpeedCPUAdam: "deepspeed.ops.adam.DeepSpeedCPUAdam",
    FusedAdam: "deepspeed.ops.adam.FusedAdam",
}

_REQUIRED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "bias_correction": True}


def validate_optimizer(optimizer: Optimizer, module: Module, *, scheduled: bool) -> None:
    """Accepts exactly the classes whose update ZenFlow implements. Subclasses are refused, since they may compute another update.

    Args:
        optimizer: from `configure_optimizers`.
        module: the model that it trains.
        scheduled: whether there is a learning rate scheduler.

    Raises:
        MisconfigurationException: its class, an option of a parameter group or a parameter is not supported.
        ValueError: a hyperparameter is out of range.
    """
    kind = type(optimizer)
    if isinstance(optimizer, _MockOptimizer):
        raise MisconfigurationException(
            "configure_optimizers must return an optimizer, got None: ZenFlowStrategy has nothing to offload then; use"
            " `Trainer(strategy='auto')`, or `validate`, `test` and `predict`"
        )
    if kind not in _SUPPORTED:
        supported = ", ".join(_SUPPORTED.values())
        raise MisconfigurationException(
            f"optimizer must be exactly one of {supported}, not a subclass, got {_qualified_name(kind)}"
        )
    known = {id(parameter) for parameter in module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for option, required in _REQUIRED_OPTIONS.items():
            value = group.get(option, required)
            if bool(value) != required:
                raise MisconfigurationException(_message(kind, index, option, repr(value), repr(required)))
        allowed, found = _unsupported_parameters(group["params"], known, scheduled=scheduled)
        if found:
            raise MisconfigurationException(_message(kind, index, "params", found, allowed))
    read_hyperparameters(optimizer)


def _unsupported_parameters(parameters: list[Parameter], known: set[int], *, scheduled: bool) -> tuple[str, str]:
    """What the parameters of a group must be, and what they are instead; the latter is empty if there is nothing to refuse."""
    for p in parameters:
        if p.layout != torch.strided or not p.is_floating_point():
            return "dense floating-point tensors", f"{p.dtype}, {p.layout}"
    if parameters and not any(p.requires_grad and p.numel() > 0 for p in parameters):
        what = "frozen parameters" if any(p.numel() > 0 for p in parameters) else "parameters without elements"
        found = (
            f"{len(parameters)} {what}; remove the group: DeepSpeed cannot hold a group that trains nothing at setup"
        )
        return "a list with a trainable parameter", found
    if scheduled and not parameters:
        return "a list with a parameter", "[]; remove the group: DeepSpeed drops it, but the scheduler counts it"
    for place, p in enumerate(parameters):
        # Checkpoints have no name for it.
        if id(p) not in known:
            found = f"one of shape {list(p.shape)} at place {place}; make it an attribute of the module"
            return "parameters of the module", found
    return "", ""


def read_hyperparameters(optimizer: Optimizer) -> list[GroupHyperparameters]:
    """The current hyperparameters of each parameter group, in the optimizer's order.

    Called at each step, after the scheduler. Never synchronises with a device: only numbers and CPU tensors are read.

    Args:
        optimizer: one that ``validate_optimizer`` accepts.

    Raises:
        ValueError: a value is out of range or not on the CPU; names the group, the key and the value.
    """
    kind = type(optimizer)
    result = []
    for index, group in enumerate(optimizer.param_groups):
        beta1, beta2 = group["betas"]
        result.append(
            GroupHyperparameters(
                lr=_number(kind, index, "lr", group["lr"]),
                beta1=_number(kind, index, "betas[0]", beta1, below=1.0),
                beta2=_number(kind, index, "betas[1]", beta2, below=1.0),
                eps=_number(kind, index, "eps", group["eps"]),
                weight_decay=_number(kind, index, "weight_decay", group["weight_decay"]),
                decoupled=_is_decoupled(optimizer, group),
            )
        )
    return result


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if isinstance(optimizer, (DeepSpeedCPUAdam, FusedAdam)):
        return bool(optimizer.adam_w_mode)
    # Since torch 2.7 Adam has it as an option, and AdamW is a subclass of Adam.
    return type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))


def _number(kind: type, index: int, key: str, value: object, *, below: float = math.inf) -> float:
    """`value` as a float >= 0 and < `below`."""
    allowed = f"a number >= 0 and < {below:g}" if math.isfinite(below) else "a finite number >= 0"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            raise ValueError(_message(kind, index, key, repr(value), f"{allowed} or a CPU tensor of one element"))
        number = float(value.item())
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ValueError(_message(kind, index, key, repr(value), allowed))
    # NaN fails every comparison.
    if not 0.0 <= number < below:
        raise ValueError(_message(kind, index, key, repr(value), allowed))
    return number


def _message(kind: type, index: int, key: str, found: str, allowed: str) -> str:
    return f"optimizer {_qualified_name(kind)}, parameter group {index}: {key} must be {allowed}, got {found}"


def _qualified_name(kind: type) -> str:
    return _SUPPORTED.get(kind, f"{kind.__module__}.{kind.__qualname__}")
