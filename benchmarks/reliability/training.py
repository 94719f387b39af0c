"""The training of the soak, its disturbances, and the comparison of its memory and checkpoints."""

import gc
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.common.trainer import quiet_trainer
from lightning_zenflow import ZenFlowStrategy

_SLACK = 8 << 20
"""Bytes; less growth is attributed to the allocator and the page cache, even where it is a large part of a small worker's memory."""


class Regression(pl.LightningModule):
    """A perceptron on data that is a function of the step, so that a resumed run sees the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / p.shape[-1] ** 0.5)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(self.trainer.global_step))
        return (self.layers(x).squeeze(1) - x.sum(1)).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(1 << 20))  # type: ignore[arg-type]


def workers() -> list[psutil.Process]:
    """Worker processes of this process."""
    return [p for p in psutil.Process().children() if p.name() == "zenflow-worker"]


class Saves(pl.Callback):
    """Saves after given steps; the last checkpoint is `leg`, the others are `between`."""

    def __init__(self, steps: list[int], folder: Path) -> None:
        self._steps = steps
        self._folder = folder

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps:
            trainer.save_checkpoint(self._folder / ("leg" if trainer.global_step == self._steps[-1] else "between"))


@dataclass
class Memory:
    """Resident bytes at the end of each leg; shared memory counts in both processes."""

    trainer: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def sample(self) -> None:
        """Adds the present sizes."""
        gc.collect()
        trainer = psutil.Process().memory_info()
        self.trainer.append(trainer.rss)
        self.shared.append(trainer.shared)
        self.worker.extend(process.memory_info().rss for process in workers())

    @staticmethod
    def growth(samples: list[int]) -> float:
        """Relative growth from the first to the last third."""
        third = max(1, len(samples) // 3)
        first, last = statistics.mean(samples[:third]), statistics.mean(samples[-third:])
        return max(0.0, last - first - _SLACK) / first


class Disturbances(pl.Callback):
    """Kills the worker at random instants, and samples the memory at the end of the leg."""

    def __init__(self, rng: random.Random, kill_every: int, memory: Memory, last_step: int) -> None:
        self._rng = rng
        self._kill_every = kill_every
        self._memory = memory
        self._last_step = last_step
        self.kills = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._last_step:
            self._memory.sample()
        elif self._rng.randrange(self._kill_every) == 0:
            time.sleep(self._rng.uniform(0, 0.003))
            for process in workers():
                process.send_signal(signal.SIGKILL)
                self.kills += 1


def fit(width: int, last_step: int, ckpt_path: Path | None, *callbacks: pl.Callback) -> int:
    """Trains up to a step; returns the number of worker restarts."""
    strategy = ZenFlowStrategy(
        update_interval=4, publish_lag=1, max_worker_restarts=10**9, checkpoint_format="deepspeed"
    )
    trainer = quiet_trainer(strategy=strategy, max_steps=last_step, callbacks=list(callbacks))
    trainer.fit(Regression(width), ckpt_path=ckpt_path)
    assert strategy.zenflow_optimizer is not None
    return strategy.zenflow_optimizer.telemetry.worker_restarts


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested dictionaries and sequences, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    return [t for part in value for t in tensors_of(part)] if isinstance(value, list | tuple) else []


def state_of(checkpoint: Path) -> list[Tensor]:
    """All tensors of a checkpoint, such as weights, master weights and moments."""
    return [t for file in sorted(checkpoint.rglob("*.pt")) for t in tensors_of(torch.load(file, weights_only=False))]
