"""The user's module of the recipe for Ray Train; imported by Ray's workers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from models import generator, small_net

SAMPLES = 32
BATCH = 4
STEPS = SAMPLES // BATCH // 2
"""Of an epoch."""


class MyModule(pl.LightningModule):
    """A small network that shuffles its samples; each step of each rank adds a record to the file ``RANK.jsonl`` in the folder `RECORDS`.

    Where `KILLED` is set, rank 1 kills its process in the second step of the second epoch, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def loss(self, samples: Tensor) -> Tensor:
        """The mean loss of some samples, by their numbers."""
        x = torch.stack([torch.randn(12, generator=generator(4, int(sample))) for sample in samples])
        return self.net(x).square().mean()

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        folder, rank = Path(os.environ["RECORDS"]), self.global_rank
        if "KILLED" in os.environ and rank == 1 and self.global_step == STEPS + 1:
            self.die_once(folder / "killed")
        loss = self.loss(batch)
        strategy: Any = self.trainer.strategy
        record = {
            "step": self.global_step,
            "samples": batch.tolist(),
            "loss": loss.item(),
            "local rank": strategy.local_rank,
            "ranks on host": strategy.num_processes,
            "workers": [p.pid for p in psutil.Process().children() if "zenflow-worker" in p.name()],
        }
        with (folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def die_once(self, file: Path) -> None:
        """Kills this process with a signal, the first time."""
        if not file.exists():
            import ray.train

            # Waits for the controller, which asks for reports every two seconds and forgets those of lost workers.
            assert len(ray.train.get_all_reported_checkpoints()) == 1
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True)
