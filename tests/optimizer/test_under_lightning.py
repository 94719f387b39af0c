"""`OffloadAdamW` under Lightning's own strategy and its Fabric, without a line for it: clipping, accumulation. Resumed: test_fsdp."""

import csv
import logging
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from typing_extensions import override

from harness import make_trainer
from lightning_loops import Module, data, fit
from lightning_zenflow import OffloadAdamW, StallMonitor
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import groups_of, loss_of, make_model, make_optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}],
    ids=["plain", "clipped", "accumulated"],
)
def test_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = (fit(who, tmp_path, **options) for who in ("ours", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)


class TwoOptimizers(L.LightningModule):
    """The second optimizer steps in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @override
    def training_step(self, batch: Tensor, number: int) -> None:
        for optimizer, layer in list(zip(self.optimizers(), (self.first, self.second), strict=True))[: 1 + number % 2]:
            self.manual_backward(layer(torch.ones(2, 8)).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    @override
    def configure_optimizers(self) -> Any:
        return [OffloadAdamW(layer.parameters(), worker_cores=1) for layer in (self.first, self.second)]


@pytest.mark.parametrize("several", [False, True])
def test_monitor(tmp_path: Path, caplog: pytest.LogCaptureFixture, several: bool) -> None:
    """Metrics of each optimizer by name, and one summary, which does not come again at the end of the object."""
    module = TwoOptimizers() if several else Module("ours")
    logger = CSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 2, "callbacks": [StallMonitor()], "limit_val_batches": 1.0}
    trainer = make_trainer("auto", max_epochs=1, **options)
    with caplog.at_level(logging.INFO):
        trainer.fit(module, data(7), None if several else data(7))
        for optimizer in trainer.optimizers:
            assert isinstance(optimizer, OffloadAdamW)
            optimizer.close()
    n_steps = [7, 3] if several else [7]
    assert re.findall(r"ZenFlow: (\d+) steps, median", caplog.text) == list(map(str, n_steps))
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        names = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    for suffix in ("", "-1")[: len(n_steps)]:
        assert f"zenflow/overlap/step_ms{suffix}" in names & {*trainer.callback_metrics}
    assert ("zenflow/overlap/step_ms-1" in names) == several


def test_monitor_without_optimizer(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match="or an optimizer OffloadAdamW, got SingleDeviceStrategy with AdamW"
    ):
        fit("torch", tmp_path, callbacks=[StallMonitor()])


def test_fabric(tmp_path: Path) -> None:
    losses, states = [], []
    for who in ("ours", "torch"):
        fabric = L.Fabric(accelerator="cpu", devices=1)
        bare = make_model(layers=2)
        model, optimizer = fabric.setup(bare, make_optimizer(who, groups_of(bare)))
        for number in range(6):
            losses.append(loss_of(model, number))
            fabric.backward(losses[-1])
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(tmp_path / who, {"model": model, "optimizer": optimizer})
        states.append(torch.load(tmp_path / who)["optimizer"]["state"])
    torch.testing.assert_close(losses[:6], losses[6:], rtol=3e-6, atol=0)
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
