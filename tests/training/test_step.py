"""`ZenFlowStep` without DeepSpeed and Lightning is AdamW."""

import pytest
import torch
from torch import Tensor

from direct_step import ADAMW, DirectStep, Environment
from reference import AdamWState

STEPS, BAD_STEP = 11, 5
SHAPES = ((12, 8), (5,), (3, 7))


def random(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize(("update_interval", "publish_lag"), [(1, 0), (2, 1), (4, 2)])
def test_its_state_is_adamws(update_interval: int, publish_lag: int) -> None:
    """With accumulation, clipping, a loss scale, selections, and a step whose gradients are not finite."""
    weights = random(0)
    keys = {"update_interval": update_interval, "publish_lag": publish_lag, "select_interval": 3, "topk_ratio": 0.3}
    direct = DirectStep(weights, **keys)
    step = direct.step
    exact = AdamWState.start(weights, torch.float64)
    try:
        for t in range(1, STEPS + 1):
            first, last = random(2 * t), random(2 * t + 1)
            if t == BAD_STEP:
                last[0][0, 0] = torch.inf
            direct.backward(first, last=False)
            direct.backward(last)
            step.step()
            gradients = [a + b for a, b in zip(first, last, strict=True)]
            exact.step(gradients, [ADAMW] * 3, max_norm=Environment.max_norm)  # type: ignore[list-item]
        step.flush()
        assert step.is_exact
        assert (int(step.count), int(step.skipped)) == (exact.count, exact.skipped) == (STEPS - 1, 1)
        expected = torch.cat([w.flatten() for w in exact.weights])
        torch.testing.assert_close(direct.master.detach().double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(direct.weights, direct.master.detach(), rtol=0, atol=0)
    finally:
        direct.close()
