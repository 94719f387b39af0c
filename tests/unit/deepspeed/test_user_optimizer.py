"""validate_optimizer and read_hyperparameters over the four supported optimizers."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_zenflow.core.step_inputs import GroupHyperparameters, read_hyperparameters
from lightning_zenflow.deepspeed.users_objects import refuse_features, validate_optimizer


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def groups() -> list[dict[str, Any]]:
    return [
        {"params": [parameter(3, 2)], "lr": 0.5, "weight_decay": 0.25},
        {"params": [parameter(3)], "betas": (0.5, 0.75), "eps": 0.125},
    ]


def validate(optimizer: Optimizer) -> None:
    validate_optimizer(optimizer, nn.ParameterList(p for g in optimizer.param_groups for p in g["params"]))


def deepspeed_optimizer(kind: type, adam_w_mode: Any) -> Optimizer:
    """An instance with its groups, but without the kernel that the constructor compiles (FusedAdam's for CUDA)."""
    optimizer = kind.__new__(kind)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    if kind is DeepSpeedCPUAdam:
        defaults["amsgrad"] = False
    Optimizer.__init__(optimizer, groups(), defaults)
    optimizer.adam_w_mode = adam_w_mode
    return optimizer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "decoupled"),
    [
        (lambda: torch.optim.AdamW(groups(), weight_decay=0.0), True),
        (lambda: torch.optim.Adam(groups()), False),
        (lambda: deepspeed_optimizer(DeepSpeedCPUAdam, True), True),
        (lambda: deepspeed_optimizer(DeepSpeedCPUAdam, False), False),
        (lambda: deepspeed_optimizer(FusedAdam, 1), True),
        (lambda: deepspeed_optimizer(FusedAdam, 0), False),
    ],
)
def test_supported_optimizers_and_their_groups(make: Callable[[], Optimizer], decoupled: bool) -> None:
    validate(make())
    assert read_hyperparameters(make()) == [
        GroupHyperparameters(lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.25, decoupled=decoupled),
        GroupHyperparameters(lr=1e-3, beta1=0.5, beta2=0.75, eps=0.125, weight_decay=0.0, decoupled=decoupled),
    ]
    for option, required in {"amsgrad": False, "maximize": False, "bias_correction": True}.items():
        optimizer = make()
        optimizer.param_groups[1][option] = not required
        message = f"parameter group 1: {option} must be {required}, got {not required}"
        with pytest.raises(MisconfigurationException, match=message):
            validate(optimizer)


def test_decoupled_option_of_adam_and_values_that_are_tensors() -> None:
    in_tensor = torch.optim.AdamW([parameter(2)], lr=torch.tensor([1.0], dtype=torch.float64), capturable=True)
    assert read_hyperparameters(in_tensor)[0].lr == 1.0
    optimizer = torch.optim.Adam([parameter(2)])
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    assert read_hyperparameters(optimizer)[0].decoupled
    # torch before 2.7 has no such option.
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    assert not read_hyperparameters(optimizer)[0].decoupled


@pytest.mark.parametrize("kind", [torch.optim.SGD, type("Derived", (torch.optim.AdamW,), {})])
def test_other_optimizers_are_refused_by_name(kind: type[Optimizer]) -> None:
    with pytest.raises(MisconfigurationException) as error:
        validate(kind([parameter(2)]))  # type: ignore[call-arg]
    assert str(error.value) == (
        "optimizer must be exactly one of torch.optim.AdamW, torch.optim.Adam, deepspeed.ops.adam.DeepSpeedCPUAdam, "
        f"deepspeed.ops.adam.FusedAdam, not a subclass, got {kind.__module__}.{kind.__qualname__}"
    )


def test_sequence_parallelism_of_an_engine_is_refused_by_name() -> None:
    kinds = ("dtype", "gradient_accumulation_dtype", "master_weights_and_grads_dtype")
    float32 = dict.fromkeys(kinds, torch.float32)
    refuse_features(SimpleNamespace(sequence_parallel_size=1, **float32), {})
    with pytest.raises(MisconfigurationException, match="does not support sequence parallelism; turn it off"):
        refuse_features(SimpleNamespace(sequence_parallel_size=2, **float32), {})


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "beta1", "beta2"])
def test_number_out_of_range_is_refused(key: str) -> None:
    upper = 1.0 if key.startswith("beta") else math.inf
    for value in [-0.1, math.nan, upper, None, "0.1", True, torch.tensor([0.1, 0.1]), torch.zeros((), device="meta")]:
        optimizer = torch.optim.AdamW(groups())
        pairs = {"beta1": (value, 0.9), "beta2": (0.9, value)}
        optimizer.param_groups[1]["betas" if key in pairs else key] = pairs.get(key, value)
        for check in (validate, read_hyperparameters):
            with pytest.raises(ValueError) as error:
                check(optimizer)
            assert str(error.value).startswith(f"optimizer torch.optim.AdamW, parameter group 1: {key} must be a")
