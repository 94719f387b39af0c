"""Parameters that are without a gradient in many steps, over 300 steps in bf16: DeepSpeed's regressions as scenarios."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from models import OptimizerOptions, TestModule, generator
from side_by_side import NOTHING_LATE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_worker_is_left")]

STEPS = 300
EXPERTS = 4


class Experts(TestModule):
    """Layers of which each micro-batch uses the first and at most one other, towards those of a teacher.

    Args:
        fixed: whether the gradients do not depend on the weights.
    """

    lr = 3e-3

    def __init__(self, *, fixed: bool = False, **options: Any) -> None:
        super().__init__(**{"optimizer": OptimizerOptions(lr=self.lr, scheduler=False), **options})
        self.fixed = fixed
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(1 + EXPERTS))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator(20, i)) / 12**0.5)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        g = generator(21, step, micro)
        weight = self.layers[0].weight
        x = torch.randn(16, 12, generator=g).to(weight)
        # In a third of the micro-batches no expert at all; the last expert is used in the first hundred steps only.
        expert = int(torch.randint(-2, EXPERTS - (step >= 100), (), generator=g))
        used = [0] if expert < 0 else [0, 1 + expert]
        if self.fixed:
            return sum((self.layers[i](x).float() * torch.randn(16, 12, generator=g)).mean() for i in used)
        for i in used:
            teacher = torch.randn(12, 12, generator=generator(22, i)) / 12**0.5
            x = (x.float() + torch.tanh(self.layers[i](x).float()) - torch.tanh(x.float() @ teacher)).to(x)
        start = torch.randn(16, 12, generator=generator(21, step, micro))
        return (x.float() - start).square().mean()


def adamw(model: Experts, steps: int, accumulate: int) -> list[Tensor]:
    """Exact weights after AdamW in float32 on the gradients of the model in bf16; a gradient that is missing is zero."""
    shown = [p for group in model.parameter_groups() for p in group]
    exact = {p: nn.Parameter(p.detach().bfloat16().float()) for p in shown}
    optimizer = model.configure_optimizers()
    for group in optimizer.param_groups:
        group["params"] = [exact[p] for p in group["params"]]
    model.bfloat16()
    for step in range(steps):
        for p in shown:
            p.data = exact[p].detach().bfloat16()
            p.grad = torch.zeros_like(p)
        for micro in range(accumulate):
            (model.loss(step, micro, 0) / accumulate).backward()
        for p in shown:
            exact[p].grad = p.grad.float()
        optimizer.step()
    return [exact[p].detach() for p in shown]


def train(model: Experts, accumulate: int, keys: dict[str, Any]) -> list[Tensor]:
    """Exact weights at the end."""
    strategy = ZenFlowStrategy(**keys)
    fit(model, strategy, steps=STEPS, precision="bf16-true", accumulate_grad_batches=accumulate)
    assert strategy.zenflow_optimizer is not None
    masters = [p.detach() for p in strategy.zenflow_optimizer.single_partition_of_fp32_groups]
    exact = []
    for group, master in zip(model.parameter_groups(), masters, strict=True):
        parts = master[: sum(p.numel() for p in group)].split([p.numel() for p in group])
        exact += [part.view(p.shape).clone() for part, p in zip(parts, group, strict=True)]
    return exact


def options(accumulate: int) -> dict[str, Any]:
    return {"length": STEPS * accumulate, "accumulate": accumulate}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("keys", [NOTHING_LATE, {"update_interval": 4, "publish_lag": 1}], ids=["S=1, d=0", "S=4"])
def test_missing_gradients_are_zero_gradients(keys: dict[str, Any], accumulate: int) -> None:
    """AdamW's numbers at every S where the gradients do not depend on the weights."""
    ours = train(Experts(fixed=True, **options(accumulate)), accumulate, keys)
    theirs = adamw(Experts(fixed=True, **options(accumulate)), STEPS, accumulate)
    for a, b in zip(ours, theirs, strict=True):
        # A micro-batch's gradient is rounded to bf16 before it is added, by us and by torch in another order.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 if accumulate == 1 else 2e-2)


def mean_loss(weights: list[Tensor]) -> float:
    """Over the last steps' data."""
    model = Experts()
    for p, exact in zip([p for group in model.parameter_groups() for p in group], weights, strict=True):
        p.data = exact
    with torch.no_grad():
        return float(torch.stack([model.loss(STEPS + i, 0, 0) for i in range(50)]).mean())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_network_trains_as_with_adamw(accumulate: int) -> None:
    exact = train(Experts(**options(accumulate)), accumulate, NOTHING_LATE)
    late = train(Experts(**options(accumulate)), accumulate, {"update_interval": 4, "publish_lag": 1})
    theirs = adamw(Experts(**options(accumulate)), STEPS, accumulate)
    start = [p.detach() for group in Experts().parameter_groups() for p in group]
    before, of_adamw = mean_loss(start), mean_loss(theirs)
    assert of_adamw < 0.2 * before
    assert mean_loss(exact) == pytest.approx(of_adamw, rel=0.05)
    assert mean_loss(late) < 2 * of_adamw
    for first, last in zip(start, late, strict=True):
        assert last.isfinite().all()
        assert (last - first).abs().mean() > 1e-2
