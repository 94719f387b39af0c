"""The squared norm that a step is expected to have, from the part that has arrived."""

import math

import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GradientNorms, StepScale


def train(prediction: GradientNorms, norms: Tensor, *, loss_scale: float = 1.0, finite: bool = True) -> list[Tensor]:
    """Steps in which the second block's gradient arrives after the first one's; what was predicted in between."""
    predicted = []
    for first, second in norms * loss_scale**2:
        prediction.open(1, max_norm=0.0, loss_scale=loss_scale)
        prediction.add([first.reshape(1)])
        prediction.up_to(0)
        predicted.append(prediction.predict(0) if prediction.knows_last else torch.zeros((), dtype=torch.float64))
        prediction.add([second.reshape(1)])
        one = torch.ones((), dtype=torch.float32)
        scale = StepScale(factor=one, finite=torch.tensor(finite), norm=one, count=one.double())
        prediction.end_step(prediction.up_to(1), scale, loss_scale)
    return predicted


def test_predictions_follow_the_scale_and_average_the_noise() -> None:
    """Norms of two blocks' gradients, each the product of the step's own scale, which is to be predicted, and noise."""
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    norms = (torch.linspace(0, 3, 400, dtype=torch.float64)[:, None] + 0.3 * noise).exp()
    found, scaled = (
        torch.stack(train(GradientNorms(2, torch.device("cpu")), norms, loss_scale=scale)[1:]) / scale**2
        for scale in (1.0, 1024.0)
    )
    whole = norms.sum(dim=1)
    error = (found / whole[1:]).log().abs().mean()
    of_last_ratio = (norms[1:, 0] * (whole / norms[:, 0])[:-1] / whole[1:]).log().abs().mean()
    assert error < 0.9 * of_last_ratio
    torch.testing.assert_close(scaled, found)


def test_a_step_that_is_not_finite_is_not_predicted_from() -> None:
    norm = GradientNorms(2, torch.device("cpu"))
    for value, finite in ((2.0, True), (math.inf, False), (math.nan, False)):
        train(norm, torch.full((1, 2), value, dtype=torch.float64), finite=finite)
    assert train(norm, torch.full((1, 2), 3.0, dtype=torch.float64))[0].item() == pytest.approx(6.0)
