"""The factor of a step: clipping by the global norm, loss scale, and norms that are not finite."""

import math

import pytest
import torch

from lightning_zenflow.core.step_inputs import step_scale


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(3.0, 0.0, 1.0), (3.0, 1.0, 1 / (3.0 + 1e-6)), (1.0, 1.0, 1 / (1.0 + 1e-6)), (0.0, 1.0, 1.0), (1e6, 1e-3, 1e-9)],
)
def test_step_scale(norm: float, max_norm: float, factor: float, loss_scale: float) -> None:
    sum_of_squares = torch.tensor((norm * loss_scale) ** 2, dtype=torch.float64)
    scale = step_scale(sum_of_squares, max_norm=max_norm, loss_scale=loss_scale, count=torch.zeros(()))
    assert scale.factor.dtype == torch.float32
    assert scale.factor.item() == pytest.approx(factor / loss_scale, rel=1e-6)
    assert scale.norm.item() == pytest.approx(norm, rel=1e-6)
    assert scale.finite.item() is True
    assert scale.count.item() == 1


@pytest.mark.parametrize(("norm", "finite"), [(math.nan, False), (math.inf, False), (1.9e19, False), (1.8e19, True)])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_step_scale_of_a_norm_that_is_too_large(norm: float, finite: bool, max_norm: float) -> None:
    """Above 1.8e19 its square is not in float32."""
    square = torch.tensor(norm, dtype=torch.float64).square()
    scale = step_scale(square, max_norm=max_norm, loss_scale=1.0, count=torch.zeros(()))
    assert scale.finite.item() is finite
    assert scale.count.item() == finite
    assert math.isnan(scale.factor.item()) is not finite
    assert scale.norm.item() == pytest.approx(norm, nan_ok=True)
