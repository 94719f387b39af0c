"""What is counted where gradients of repeated moves come back from host memory."""

import pytest
import torch

from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.deferred.provisional import ProvisionalUpdate, ReapplyAfterPublish
from lightning_zenflow.kernels.torch import TorchKernels
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Traffic
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
    schedule = UpdateSchedule(update_interval=4, publish_lag=1)
    provisional = ProvisionalUpdate(
        partition,
        [weights],
        prediction=StalenessCompensation(weight_prediction=0.0, provisional_scale=0.5),
        schedule=lambda: schedule,
        rank=0,
        kernels=kernels,
        hyperparameters=lambda: GROUPS[:1],
    )
    traffic = Traffic()
    repeated = ReapplyAfterPublish(provisional, MORE_THAN_THERE_IS, lambda: schedule, traffic)
    slot = torch.randn(6, 4).bfloat16()
    gradient = slot.to(device)
    move = provisional.measure(0, kernels.squared_norms(gradient, per_axis=True))
    # Only CUDA says how much room it has, so for the meta device the gradient is in host memory from the start.
    repeated.keep(0, 5, move, 0, slot if device == "meta" else gradient, slot)
    assert traffic == Traffic()
    repeated.published({0: 4})
    repeated.published({0: 5})
    assert (traffic.d2h_bytes, traffic.h2d_bytes) == (0, n_bytes)
    if device != "meta":
        assert torch.equal(weights.view(6, 4).sign(), -slot.sign().to(device))
