"""What is counted where gradients of repeated moves come back from host memory."""

import pytest
import torch

from lightning_zenflow.auto_schedule import Pace
from lightning_zenflow.kernels import TorchKernels
from lightning_zenflow.partition import Slice, build_partition
from lightning_zenflow.prediction import Prediction
from lightning_zenflow.repeated_moves import RepeatedMoves
from lightning_zenflow.stand_in import StandIn
from lightning_zenflow.traffic import Traffic
from small_arena import GROUPS

MORE_THAN_THERE_IS = 1 << 60


@pytest.mark.parametrize(
    ("device", "n_bytes"), [("cpu", 0), ("meta", 48), pytest.param("cuda", 48, marks=pytest.mark.gpu)]
)
def test_gradients_that_come_back_are_counted(device: str, n_bytes: int, request: pytest.FixtureRequest) -> None:
    if device == "cuda":
        request.getfixturevalue("needs_cuda")
    whole = Slice(parameter=0, param_group=0, begin=0, start=0, numel=24, columns=4, is_matrix=True)
    partition = build_partition([whole], [24], 1)
    weights = torch.zeros(24, dtype=torch.bfloat16, device=device)
    kernels = TorchKernels()
    pace = Pace(update_interval=4, publish_lag=1)
    stand_in = StandIn(
        partition,
        [weights],
        prediction=Prediction(look_ahead=0.0, provisional_scale=0.5),
        pace=lambda: pace,
        rank=0,
        kernels=kernels,
        hyperparameters=lambda: GROUPS[:1],
    )
    traffic = Traffic()
    repeated = RepeatedMoves(stand_in, MORE_THAN_THERE_IS, lambda: pace, traffic)
    page = torch.randn(6, 4).bfloat16()
    gradient = page.to(device)
    move = stand_in.measure(0, kernels.statistics(gradient, directions=True))
    # Only CUDA says how much room it has, so for the meta device the gradient is in host memory from the start.
    repeated.keep(0, 5, move, 0, page if device == "meta" else gradient, page)
    assert traffic == Traffic()
    repeated.published({0: 4})
    repeated.published({0: 5})
    assert (traffic.down_bytes, traffic.up_bytes) == (0, n_bytes)
    if device != "meta":
        assert torch.equal(weights.view(6, 4).sign(), -page.sign().to(device))
