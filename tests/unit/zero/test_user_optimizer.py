"""validate_optimizer and read_hyperparameters over the four supported optimizers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.zero.user_optimizer import read_hyperparameters, validate_optimizer


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))


def groups() -> list[dict[str, Any]]:
    return [
        {"params": [parameter(3, 2)], "lr": 0.5, "weight_decay": 0.25},
        {"params": [parameter(3)], "betas": (0.5, 0.75), "eps": 0.125},
    ]


def deepspeed_optimizer(kind: type, adam_w_mode: Any) -> Optimizer:
    """An instance with its groups, but without the kernel that the constructor compiles (FusedAdam's for CUDA)."""
    optimizer = kind.__new__(kind)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    if kind is DeepSpeedCPUAdam:
        defaults["amsgrad"] = False
    Optimizer.__init__(optimizer, groups(), defaults)
    optimizer.adam_w_mode = adam_w_mode
    return optimizer  # type: ignore[no-any-return]


SUPPORTED: list[tuple[str, Callable[[], Optimizer], bool]] = [
    ("AdamW", lambda: torch.optim.AdamW(groups(), weight_decay=0.0), True),
    ("Adam", lambda: torch.optim.Adam(groups()), False),
    ("DeepSpeedCPUAdam", lambda: deepspeed_optimizer(DeepSpeedCPUAdam, True), True),
    ("DeepSpeedCPUAdam as Adam", lambda: deepspeed_optimizer(DeepSpeedCPUAdam, False), False),
    ("FusedAdam", lambda: deepspeed_optimizer(FusedAdam, 1), True),
    ("FusedAdam as Adam", lambda: deepspeed_optimizer(FusedAdam, 0), False),
]


@pytest.mark.parametrize(("make", "decoupled"), [pytest.param(m, d, id=name) for name, m, d in SUPPORTED])
def test_supported_optimizers_and_their_groups(make: Callable[[], Optimizer], decoupled: bool) -> None:
    optimizer = make()
    validate_optimizer(optimizer)
    assert read_hyperparameters(optimizer) == [
        GroupHyperparameters(lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.25, decoupled=decoupled),
        GroupHyperparameters(lr=1e-3, beta1=0.5, beta2=0.75, eps=0.125, weight_decay=0.0, decoupled=decoupled),
    ]


def test_decoupled_option_of_adam() -> None:
    optimizer = torch.optim.Adam([parameter(2)])
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    assert read_hyperparameters(optimizer)[0].decoupled
    # torch before 2.7 has no such option.
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    assert not read_hyperparameters(optimizer)[0].decoupled


def test_values_of_the_present_step_are_read() -> None:
    optimizer = torch.optim.AdamW([parameter(2)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert read_hyperparameters(optimizer)[0].lr == 1.0
    optimizer.step()
    scheduler.step()
    assert read_hyperparameters(optimizer)[0].lr == 0.5


@pytest.mark.parametrize("lr", [torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)])
def test_tensor_on_the_cpu(lr: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW([parameter(2)], lr=lr, capturable=True, foreach=False)
    validate_optimizer(optimizer)
    assert read_hyperparameters(optimizer)[0].lr == 0.25


class Derived(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.optim.SGD([parameter(2)]), "torch.optim.sgd.SGD"),
        (lambda: torch.optim.SparseAdam([parameter(2)]), "torch.optim.sparse_adam.SparseAdam"),
        (lambda: torch.optim.RAdam([parameter(2)]), "torch.optim.radam.RAdam"),
        (lambda: Derived([parameter(2)]), f"{Derived.__module__}.Derived"),
    ],
)
def test_other_optimizers_are_refused_by_name(make: Callable[[], Optimizer], name: str) -> None:
    with pytest.raises(MisconfigurationException) as error:
        validate_optimizer(make())
    assert str(error.value) == (
        "optimizer must be exactly one of torch.optim.AdamW, torch.optim.Adam, deepspeed.ops.adam.DeepSpeedCPUAdam, "
        f"deepspeed.ops.adam.FusedAdam, not a subclass, got {name}"
    )


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("amsgrad", True, False),
        ("maximize", True, False),
        ("differentiable", True, False),
        ("bias_correction", False, True),
    ],
)
@pytest.mark.parametrize("make", [make for _, make, _ in SUPPORTED])
def test_option_of_a_group_is_refused(option: str, value: bool, allowed: bool, make: Callable[[], Optimizer]) -> None:
    optimizer = make()
    optimizer.param_groups[1][option] = value
    with pytest.raises(MisconfigurationException, match=f"parameter group 1: {option} must be {allowed}, got {value}"):
        validate_optimizer(optimizer)


@pytest.mark.parametrize(
    "data", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()], ids=["complex", "sparse"]
)
def test_parameters_other_than_dense_floats_are_refused(data: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW([{"params": [parameter(2)]}, {"params": [torch.nn.Parameter(data)]}])
    with pytest.raises(MisconfigurationException, match=r"parameter group 1: params must be dense .* tensors, got "):
        validate_optimizer(optimizer)


WRONG = [-0.1, math.nan, None, "0.1", True, torch.tensor([0.1, 0.1]), torch.zeros((), device="meta")]


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "betas[0]", "betas[1]"])
def test_number_out_of_range_is_refused(key: str, value: Any) -> None:
    optimizer = torch.optim.AdamW(groups())
    group = optimizer.param_groups[1]
    if key.startswith("betas"):
        group["betas"] = (value, 0.9) if key == "betas[0]" else (0.9, value)
    else:
        group[key] = value
    name = key.replace("[", r"\[").replace("]", r"\]")
    for check in (validate_optimizer, read_hyperparameters):
        with pytest.raises(ValueError, match=rf"optimizer torch.optim.AdamW, parameter group 1: {name} must be a"):
            check(optimizer)


@pytest.mark.parametrize(
    ("key", "value"), [("lr", math.inf), ("weight_decay", math.inf), ("betas", (1.0, 0.9)), ("betas", (0.9, 1))]
)
def test_upper_bounds(key: str, value: Any) -> None:
    optimizer = torch.optim.AdamW(groups())
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=rf"parameter group 0: {key}\S* must be a"):
        read_hyperparameters(optimizer)
