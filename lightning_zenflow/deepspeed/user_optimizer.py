"""The optimizer from `configure_optimizers`: checks that ZenFlow can replace it, and reads its hyperparameters at each step."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deepspeed.parameters import is_in_pieces

_SUPPORTED: dict[type, str] = {
    torch.optim.AdamW: "torch.optim.AdamW",
    torch.optim.Adam: "torch.optim.Adam",
    DeepSpeedCPUAdam: "deepspeed.ops.adam.DeepSpeedCPUAdam",
    FusedAdam: "deepspeed.ops.adam.FusedAdam",
}

REQUIRED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "bias_correction": True}
"""Of a parameter group."""

_trained: "WeakSet[Optimizer]" = WeakSet()
"""Those that a training has given back: its moments are in its own arena."""


class UsersOptimizer:
    """The user's optimizer, which has DeepSpeed's groups and state while it trains, and its own groups and no state before and after.

    Args:
        optimizer: before DeepSpeed's set-up.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.state or optimizer in _trained:
            rank_zero_warn(
                "ZenFlow: the optimizer's moments and step count start at zero, unless a checkpoint is loaded (ckpt_path). It has"
                " trained before, and strategy='auto' would continue its own; make it in configure_optimizers to begin anew"
            )
        self._optimizer, groups = optimizer, optimizer.param_groups
        self._is_given_back = False
        # What the other side has as groups, in them, and as the state: nothing is left for the user.
        self._other = list(groups), [list(group["params"]) for group in groups], defaultdict[Tensor, Any](dict)

    def give_back(self) -> None:
        """Ends the training. May be called again."""
        if not self._is_given_back:
            self._exchange()
            _trained.add(self._optimizer)

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Context in which DeepSpeed's code finds its own, after the training as well."""
        was_given_back = self._is_given_back
        if was_given_back:
            self._exchange()
        try:
            yield
        finally:
            if was_given_back:
                self._exchange()

    def _exchange(self) -> None:
        ours, (groups, of_groups, state) = self._optimizer.param_groups, self._other
        self._other = list(ours), [group["params"] for group in ours], self._optimizer.state
        # DeepSpeed's own optimizer removes groups of which nothing is trained.
        ours[:] = groups
        for group, params in zip(groups, of_groups, strict=True):
            group["params"] = params
        self._optimizer.state = state
        self._is_given_back = not self._is_given_back


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
    if kind not in _SUPPORTED:
        supported = ", ".join(_SUPPORTED.values())
        found = f"{kind.__module__}.{kind.__qualname__}"
        raise MisconfigurationException(f"optimizer must be exactly one of {supported}, not a subclass, got {found}")
    known = {id(parameter) for parameter in module.parameters()}
    # Who asks for the shapes of divided parameters gets empty ones, and all parameters in one group.
    divided = (
        "; or choose groups by `p.ds_shape` or by name: stage 3 has divided the parameters, and `p.shape` and `p.ndim` are those of"
        " nothing"
        if is_in_pieces(module)
        else ""
    )
    for index, group in enumerate(optimizer.param_groups):
        for option, required in REQUIRED_OPTIONS.items():
            value = group.get(option, required)
            if bool(value) != required:
                raise MisconfigurationException(f"{_place(optimizer, index)}{option} must be {required}, got {value!r}")
        params = group["params"]
        if (params or scheduled or divided) and not any(p.requires_grad and whole_numel(p) > 0 for p in params):
            raise MisconfigurationException(
                f"{_place(optimizer, index)}params must be a list with a trainable parameter, got {len(params)} frozen or empty ones;"
                " remove the group: DeepSpeed cannot hold one that trains nothing at setup, and drops one of no parameters, which a"
                f" scheduler counts{divided}"
            )
        for place, p in enumerate(params):
            # Checkpoints have no name for it.
            if id(p) not in known:
                raise MisconfigurationException(
                    f"{_place(optimizer, index)}params must be parameters of the module, got one of shape {list(p.shape)} at place"
                    f" {place}; make it an attribute of the module"
                )
    read_hyperparameters(optimizer)


def read_hyperparameters(optimizer: Optimizer) -> list[GroupHyperparameters]:
    """The current hyperparameters of each parameter group, in the optimizer's order.

    Called at each step, after the scheduler. Never synchronises with a device: only numbers and CPU tensors are read.

    Args:
        optimizer: one that ``validate_optimizer`` accepts.

    Raises:
        ValueError: a value is out of range or not on the CPU; names the group, the key and the value.
    """
    result = []
    for index, group in enumerate(optimizer.param_groups):
        numbers = {key: group[key] for key in ("lr", "eps", "weight_decay")}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        for key, value in numbers.items():
            below = 1.0 if key.startswith("beta") else math.inf
            is_read = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
            number = value.item() if is_read else value
            # NaN fails every comparison.
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < below:
                must = f"a number >= 0 and < {below:g}, or a CPU tensor of one element with it"
                raise ValueError(f"{_place(optimizer, index)}{key} must be {must}, got {value!r}")
            numbers[key] = float(number)
        result.append(GroupHyperparameters(**numbers, decoupled=_is_decoupled(optimizer, group)))
    return result


def whole_numel(parameter: Tensor) -> int:
    """Elements of a parameter, also of one of which this rank has a piece only."""
    # Private: stage 3's, after `zero.Init`.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if isinstance(optimizer, (DeepSpeedCPUAdam, FusedAdam)):
        return bool(optimizer.adam_w_mode)
    # Since torch 2.7 Adam has it as an option, and AdamW is a subclass of Adam.
    return type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))


def _place(optimizer: Optimizer, index: int) -> str:
    return f"optimizer {_SUPPORTED[type(optimizer)]}, parameter group {index}: "
