"""The transformer of `plain_loops` under Lightning's Trainer, with `OffloadAdamW` or with torch's AdamW."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from plain_loops import Who, batch, groups_of, loss_of, make_model, make_optimizer


class Module(L.LightningModule):
    """With a scheduler; keeps its losses. Where the strategy has a mesh, the model is divided over it."""

    def __init__(self, who: Who) -> None:
        super().__init__()
        self.who, self.model, self.losses = who, make_model(layers=2), list[Tensor]()

    @override
    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(next(self.model.parameters()), DTensor):
            for module in (*self.model, self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    @override
    def training_step(self, tokens: list[Tensor], _: int) -> Tensor:
        loss = loss_of(self.model, 0, lambda _: tokens[0])
        self.losses.append(loss.detach())
        return loss

    @override
    def validation_step(self, tokens: list[Tensor], _: int) -> None:
        self.losses.append(loss_of(self.model, 0, lambda _: tokens[0]))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.who, groups_of(self.model))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(batches: int) -> DataLoader[Any]:
    """Batches of four."""
    return DataLoader(TensorDataset(torch.cat([batch(number) for number in range(batches)])), batch_size=4)


def fit(
    who: Who, folder: Path | str, *, batches: int = 7, epochs: int = 2, ckpt: Path | None = None, **options: Any
) -> list[Tensor]:
    """Losses of a training on the CPU, which saves its checkpoint in a folder."""
    module = Module(who)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data(batches), data(batches), ckpt_path=ckpt)
    return module.losses
