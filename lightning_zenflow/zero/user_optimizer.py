"""Which optimizers ZenFlow takes the place of, and what it reads from them at each step."""

import math
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_zenflow.core.step_inputs import GroupHyperparameters

_SUPPORTED: dict[type, str] = {
    torch.optim.AdamW: "torch.optim.AdamW",
    torch.optim.Adam: "torch.optim.Adam",
    DeepSpeedCPUAdam: "deepspeed.ops.adam.DeepSpeedCPUAdam",
    FusedAdam: "deepspeed.ops.adam.FusedAdam",
}

_REQUIRED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "bias_correction": True}


def validate_optimizer(optimizer: Optimizer) -> None:
    """Accept exactly the optimizers whose update ZenFlow computes itself; a subclass may compute another one.

    Raises:
        MisconfigurationException: its class, an option of a parameter group or a parameter is not supported.
        ValueError: a hyperparameter is out of range.
    """
    kind = type(optimizer)
    if kind not in _SUPPORTED:
        supported = ", ".join(_SUPPORTED.values())
        raise MisconfigurationException(
            f"optimizer={_qualified_name(kind)}: allowed is one of {supported} (the class itself, not one derived from it)"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option, required in _REQUIRED_OPTIONS.items():
            value = group.get(option, required)
            if bool(value) != required:
                raise MisconfigurationException(_message(kind, index, option, value, repr(required)))
        for parameter in group["params"]:
            if parameter.layout != torch.strided or not parameter.is_floating_point():
                found = f"{parameter.dtype}, {parameter.layout}"
                raise MisconfigurationException(
                    _message(kind, index, "params", found, "dense tensors of floating-point numbers")
                )
    read_hyperparameters(optimizer)


def refuse_groups_without_training(optimizer: Optimizer, *, scheduled: bool) -> None:
    """Refuses parameter groups that DeepSpeed cannot hold, or would drop behind a scheduler's back.

    Args:
        optimizer: from `configure_optimizers`.
        scheduled: whether a learning rate scheduler counts on the number of groups.

    Raises:
        MisconfigurationException: names the group.
    """
    for index, group in enumerate(optimizer.param_groups):
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"]):
            found = f"{len(group['params'])} frozen parameters"
            allowed = "at least one with requires_grad=True, or no such group; DeepSpeed trains no group that is frozen at setup"
            raise MisconfigurationException(_message(type(optimizer), index, "params", found, allowed))
        if scheduled and not group["params"]:
            allowed = "at least one parameter, or no such group: DeepSpeed drops it, and the scheduler counts it"
            raise MisconfigurationException(_message(type(optimizer), index, "params", [], allowed))


def read_hyperparameters(optimizer: Optimizer) -> list[GroupHyperparameters]:
    """The present hyperparameters of each parameter group, in the optimizer's order.

    To be called at each step, after the scheduler. Never waits for a device: numbers and tensors on the CPU are read,
    others refused.

    Args:
        optimizer: one that ``validate_optimizer`` accepts.

    Raises:
        ValueError: a value is out of range or on a device; the message names the group, the key, the value and what is
            allowed.
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
    # Newer versions of torch have it as an option of Adam and derive AdamW from that.
    return type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))


def _number(kind: type, index: int, key: str, value: object, *, below: float = math.inf) -> float:
    """`value` as a float >= 0 and < `below`."""
    allowed = f"a number >= 0 and < {below:g}" if math.isfinite(below) else "a finite number >= 0"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            raise ValueError(_message(kind, index, key, value, f"{allowed} or a tensor with one on the CPU"))
        number = float(value.item())
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ValueError(_message(kind, index, key, value, allowed))
    # NaN fails every comparison.
    if not 0.0 <= number < below:
        raise ValueError(_message(kind, index, key, value, allowed))
    return number


def _message(kind: type, index: int, key: str, value: object, allowed: str) -> str:
    return f"optimizer {_qualified_name(kind)}, parameter group {index}: {key}={value!r}: allowed is {allowed}"


def _qualified_name(kind: type) -> str:
    return _SUPPORTED.get(kind, f"{kind.__module__}.{kind.__qualname__}")
