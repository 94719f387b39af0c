"""Traffic of provisional updates that are applied again after a publish."""

import pytest
import torch

from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.deferred.provisional import ProvisionalUpdate, TileGradient
from lightning_zenflow.kernels.base import Destination
from lightning_zenflow.kernels.torch import TorchKernels
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Traffic
from rank_states import make_rank_state
from small_arena import GROUPS


@pytest.mark.parametrize(
    ("device", "n_bytes"), [("cpu", 0), ("meta", 48), pytest.param("cuda", 48, marks=pytest.mark.gpu)]
)
def test_gradients_that_come_back_are_counted(
    device: str, n_bytes: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        request.getfixturevalue("needs_cuda")
    whole = Slice(parameter=0, param_group=0, begin=0, start=0, numel=24, columns=4, is_matrix=True)
    partition = build_partition([whole], [24], 1)
    weights = torch.zeros(24, dtype=torch.bfloat16, device=device)
    rank = make_rank_state(partition, [weights], kernels=TorchKernels())
    schedule = UpdateSchedule(update_interval=4, publish_lag=1)
    compensation = StalenessCompensation(weight_prediction=0.0, provisional_scale=0.5)
    provisional = ProvisionalUpdate(rank, compensation, rank_number=0)
    slot = torch.randn(6, 4).bfloat16()
    gradient = slot.to(device)
    factors = provisional.measure(0, rank.kernels.squared_norms(gradient, per_axis=True), GROUPS[0])
    tile = TileGradient(block=0, destination=Destination(begin=0, slot=slot), age=1, due_step=6)
    # Only CUDA says how much room it has, so for the meta device the gradient is in host memory from the start.
    monkeypatch.setattr("lightning_zenflow.deferred.provisional.has_room", lambda *_: False)
    provisional.reapply.keep(5, factors, slot if device == "meta" else gradient, tile, schedule)
    traffic = rank.telemetry.traffic
    assert traffic == Traffic()
    provisional.reapply.published({0: 4}, schedule)
    provisional.reapply.published({0: 5}, schedule)
    assert (traffic.d2h_bytes, traffic.h2d_bytes) == (0, n_bytes)
    if device != "meta":
        assert torch.equal(weights.view(6, 4).sign(), -slot.sign().to(device))
