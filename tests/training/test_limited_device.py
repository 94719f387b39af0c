"""Models larger than the device: stage 3 with parameters in host memory on a recorded device of limited memory; what crosses its link."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from harness import StockStrategy, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import generator
from recorded_device.device import RecordedDevice
from recorded_device.watch import recorded_device

WIDTH, LAYERS, STEPS = 256, 40, 3
LAYER = WIDTH**2
MODEL_BYTES = 2 * LAYERS * LAYER
ZERO = {
    "stage": 3,
    "reduce_bucket_size": LAYER,
    # A layer ahead, and none is kept from the forward to the backward pass.
    "stage3_prefetch_bucket_size": LAYER,
    "stage3_max_live_parameters": 2 * LAYER,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


class Deep(pl.LightningModule):
    """Many equal layers, made in pieces, so that they never are on the device together."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    @override
    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / LAYERS
        loss = (x - batch.roll(1, 1)).float().square().mean()
        self.losses.append(loss.detach())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        batch = torch.randn(2, WIDTH, generator=generator(9)).bfloat16()
        return DataLoader(batch.repeat(STEPS, 1), batch_size=2)  # type: ignore[arg-type]


def train(strategy: ZenFlowStrategy, *, memory_limit: float = torch.inf) -> tuple[Sequence[float], RecordedDevice]:
    """Losses of all steps, and the device."""
    with recorded_device(memory_limit=memory_limit) as device:
        model = Deep()
        options: dict[str, Any] = {"precision": "bf16-true", "max_steps": STEPS, "gradient_clip_val": 0.1}
        make_trainer(strategy, callbacks=[device.step_ends()], **options).fit(model)
        return torch.stack(model.losses).tolist(), device


def strategy_of(place: str, kind: type[ZenFlowStrategy] = ZenFlowStrategy) -> ZenFlowStrategy:
    config = {"zero_optimization": {**ZERO, "offload_param": {"device": place}}}
    return kind(config, update_interval=1, publish_lag=0, worker_cores=1)


def test_a_model_of_four_times_the_devices_memory() -> None:
    losses, _ = train(strategy_of("cpu"))
    assert losses[-1] < losses[0]
    limited, of_limited = train(strategy_of("cpu"), memory_limit=MODEL_BYTES / 4)
    assert limited == losses and not of_limited.order.races
    with pytest.raises(torch.OutOfMemoryError):
        train(strategy_of("none"), memory_limit=MODEL_BYTES / 4)


@pytest.mark.parametrize(
    ("kind", "down", "up"), [(ZenFlowStrategy, 2, 4), (StockStrategy, 6, 6)], ids=["ours", "DeepSpeed's"]
)
def test_bytes_a_parameter_over_the_link(kind: type[ZenFlowStrategy], down: int, up: int) -> None:
    """In a step. The last layer, with which the backward pass begins, is fetched once; batches and words are small."""
    _, device = train(strategy_of("cpu", kind))
    operations = device.order.operations
    ends = [i for i, o in enumerate(operations) if o.kind == "step"]
    # Gloo reduces in host memory.
    of_step = [o for o in operations[ends[-2] : ends[-1]] if o.place != "stage3.__avg_scatter_grads"]
    counted = [sum(o.n_bytes for o in of_step if o.kind == way) / (LAYERS * LAYER) for way in ("d2h", "h2d")]
    assert counted == pytest.approx([down, up - 2 / LAYERS], abs=0.01)
