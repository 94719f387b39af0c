"""Every implementation's exact step against the oracle in float64 and the worker's kernel."""

import pytest
import torch

from kernel_cases import COMPILED, DTYPES, TORCH, Implementation, each_with, group, random
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from models import generator
from oracle import adamw_reference

N = 257
STEPS = 20


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    # Elements from 1e-6 to 1: small ones are where eps and the order of operations show.
    sizes = torch.logspace(-6, 0, N)
    return [(torch.randn(N, generator=generator(9, step)) * sizes).to(dtype) for step in range(STEPS)]


def learning_rate(step: int) -> float:
    return 1e-2 / (1 + step)


@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.1, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_float64(on: Implementation, weight_decay: float, decoupled: bool, dtype: torch.dtype) -> None:
    """With gradients that the factor makes an eighth of."""
    initial = torch.randn(N, generator=generator(8))
    state = torch.stack([initial, torch.zeros(N), torch.zeros(N)]).to(on.device)
    options = {"weight_decay": weight_decay, "decoupled": decoupled}
    for step, gradient in enumerate(gradients(dtype)):
        scaled = 8 * gradient.to(on.device)
        h = group(lr=learning_rate(step), beta2=0.999, **options)
        on.adamw_(state, scaled, torch.empty_like(scaled), h, count=step + 1, factor=0.125)
    exact = adamw_reference(
        [initial],
        [[g] for g in gradients(dtype)],
        [[group(lr=learning_rate(step), beta2=0.999, **options)] for step in range(STEPS)],
    )
    # Twenty steps of a few roundings each.
    float64 = (exact.weights[0], exact.exp_avg[0], exact.exp_avg_sq[0])
    tolerances = ((1e-6, 1e-6), (1e-5, 1e-9), (1e-5, 1e-12))
    for ours, theirs, (rtol, atol) in zip(state.cpu(), float64, tolerances, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)


# On the CPU, torch's is what the compiled one is compared with.
@pytest.mark.parametrize(
    ("on", "n"),
    [p for p in each_with([1, 513, 600_000]) if (p.values[0].name, p.values[0].device_type) != ("torch", "cpu")],
    indirect=["on"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [group(), group(decoupled=False)], ids=["adamw", "adam"])
def test_the_workers_arithmetic(on: Implementation, n: int, dtype: torch.dtype, h: GroupHyperparameters) -> None:
    """Of `CpuKernels`, which is compiled from the worker's kernel, and that one against torch's."""
    other = TORCH if on.name == "cpu" else COMPILED
    state, expected = on.random(3, n).abs(), random(3, n).abs()
    # The first one is skipped, too: the weights then are the masters.
    for step, factor in ((0, torch.nan), (1, 0.5), (2, 0.5), (2, torch.nan), (3, 0.5)):
        gradient, before = random(n, seed=step, dtype=dtype), state.clone()
        if factor != factor:
            gradient[0], gradient[n // 2], gradient[-1] = torch.nan, torch.inf, -torch.inf
        ours = gradient.to(on.device, copy=True)
        weights = ours if step == 3 else torch.empty_like(ours)  # they may take the gradient's place
        on.adamw_(state, ours, weights, h, count=step, factor=factor)
        other.adamw_(expected, gradient, torch.empty(n, dtype=dtype), h, count=step, factor=factor)
        assert factor == factor or torch.equal(state, before)
        # The interpreter truncates to bfloat16.
        unit = torch.finfo(dtype).eps if on.is_interpreted and dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(weights, state[0].to(dtype), rtol=unit, atol=0)
    # The interpreter rounds between the two operations of a fused multiply-add.
    torch.testing.assert_close(state.cpu(), expected, rtol=2e-6, atol=2e-7)
    assert str(on) != "triton-cuda" or torch.equal(state.cpu(), expected)
