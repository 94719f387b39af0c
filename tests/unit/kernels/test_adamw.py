"""The device's AdamW against torch's and against float64."""

import itertools
from typing import Any

import pytest
import torch

from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.kernels.torch import adamw_step_
from models import generator
from reference import Group, adamw_reference

N = 257
STEPS = 20


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    # Elements from 1e-6 to 1: small ones are where eps and the order of operations show.
    sizes = torch.logspace(-6, 0, N)
    return [(torch.randn(N, generator=generator(9, step)) * sizes).to(dtype) for step in range(STEPS)]


def hyperparameters(step: int, *, weight_decay: float, decoupled: bool) -> GroupHyperparameters:
    return GroupHyperparameters(
        lr=1e-2 / (1 + step), beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
    )


class State:
    def __init__(self) -> None:
        self.master = torch.randn(N, generator=generator(8))
        self.exp_avg = torch.zeros(N)
        self.exp_avg_sq = torch.zeros(N)
        self.count = torch.zeros((), dtype=torch.float64)

    def step(self, gradient: torch.Tensor, factor: float = 1.0, finite: bool = True, **options: Any) -> None:
        self.count += finite
        adamw_step_(
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            gradient,
            hyperparameters=hyperparameters(**options),
            count=self.count,
            factor=torch.tensor(factor if finite else float("nan")),
            finite=torch.tensor(finite),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.master, self.exp_avg, self.exp_avg_sq]


@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.1, True), (0.0, False), (0.1, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch_and_float64(weight_decay: float, decoupled: bool, dtype: torch.dtype) -> None:
    ours = State()
    initial = ours.master.clone()
    theirs = torch.nn.Parameter(initial.clone())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], lr=1e-2, weight_decay=weight_decay)
    for step, gradient in enumerate(gradients(dtype)):
        ours.step(gradient, step=step, weight_decay=weight_decay, decoupled=decoupled)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        theirs.grad = gradient.float()
        optimizer.step()
    # Twenty steps of a few roundings each, in another order than torch's.
    torch.testing.assert_close(ours.master, theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg, optimizer.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(ours.exp_avg_sq, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-12)

    exact = adamw_reference(
        [initial],
        [[g] for g in gradients(dtype)],
        [[Group(lr=1e-2 / (1 + step), weight_decay=weight_decay, decoupled=decoupled)] for step in range(STEPS)],
    )
    torch.testing.assert_close(ours.master.double(), exact.weights[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg.double(), exact.exp_avg[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(ours.exp_avg_sq.double(), exact.exp_avg_sq[0], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.1, True), (0.1, False)])
@pytest.mark.parametrize("at", [0, 3])
def test_a_step_that_is_not_finite_changes_no_bit(weight_decay: float, decoupled: bool, at: int) -> None:
    skipping, plain = State(), State()
    options = {"weight_decay": weight_decay, "decoupled": decoupled}
    for step, gradient in enumerate(gradients()):
        if step == at:
            bad = gradient.clone()
            bad[0], bad[1], bad[2] = float("nan"), float("inf"), -float("inf")
            before = [t.clone() for t in skipping.tensors()]
            skipping.step(bad, finite=False, step=step, **options)
            assert all(torch.equal(a, b) for a, b in zip(before, skipping.tensors(), strict=True))
        skipping.step(gradient, step=step, **options)
        plain.step(gradient, step=step, **options)
    assert all(torch.equal(a, b) for a, b in zip(skipping.tensors(), plain.tensors(), strict=True))
    assert skipping.count == plain.count == STEPS


def test_the_factor_multiplies_the_gradient() -> None:
    scaled, plain = State(), State()
    for step, gradient in enumerate(gradients()):
        scaled.step(gradient * 8, factor=0.125, step=step, weight_decay=0.1, decoupled=True)
        plain.step(gradient, step=step, weight_decay=0.1, decoupled=True)
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(scaled.tensors(), plain.tensors()))


def test_nothing_to_update() -> None:
    empty = torch.empty(0)
    adamw_step_(
        empty,
        empty.clone(),
        empty.clone(),
        empty,
        hyperparameters=hyperparameters(0, weight_decay=0.1, decoupled=True),
        count=torch.ones((), dtype=torch.float64),
        factor=torch.tensor(1.0),
        finite=torch.tensor(True),
    )
