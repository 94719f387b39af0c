"""A user's first script, without anything of the tests: trains a small model on the CPU. `python first_training.py DEVICES`."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_zenflow  # registers "zenflow"


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(512, 32, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :1] * 2), batch_size=16)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(devices: int, strategy: Any = "zenflow") -> None:
    pl.seed_everything(1)
    model = Model()
    x, y = model.train_dataloader().dataset.tensors  # type: ignore[attr-defined]
    before = nn.functional.mse_loss(model.net(x), y).item()
    options: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 16}
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    trainer.fit(model)
    # DeepSpeed's Muon would compile its functions, for seconds.
    assert "torch._inductor.compile_fx" not in sys.modules
    after = nn.functional.mse_loss(model.net(x), y).item()
    assert trainer.world_size == devices
    assert after < before / 4, (before, after)
    if trainer.is_global_zero:
        assert trainer.callback_metrics["zenflow/overlap/step_ms"] > 0
        where = lightning_zenflow.__file__
        print(f"trained in {trainer.world_size} process(es), loss {before:.3f} to {after:.3f}, package {where}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
