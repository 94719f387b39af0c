"""The byte-level GPT: training on Python's standard library, fine-tuning on C headers."""

import fcntl
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.common.gpt import GPT
from benchmarks.common.trainer import quiet_trainer
from benchmarks.convergence.corpus import python_library, sha256, to_tensor
from benchmarks.convergence.optimizers import MakeOptimizer, adamw

TRAIN_BYTES = 2_000_000
HELD_OUT_FROM = 2_100_000
EVALUATION_SEED = 123
EVALUATION_WINDOWS = 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and its batches."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 64
    """Bytes in a window."""
    batch: int = 16
    """Windows in a batch."""


@dataclass(frozen=True, kw_only=True)
class PreTraining:
    """Pre-training in 32 bits with torch's AdamW."""

    steps: int
    lr: float = 2e-3
    seed: int = 0


def warm_up_and_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up over a tenth of the steps, at most 40, times a cosine that ends at a tenth."""
    warm_up = min(40, max(1, steps // 10))
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


class GptModule(pl.LightningModule):
    """Trains a GPT, all parameters in one group.

    Args:
        model: the GPT.
        lr: peak learning rate.
        steps: length of the schedule.
        make_optimizer: optimizer from module, learning rate and weight decay.
    """

    def __init__(self, model: GPT, *, lr: float, steps: int, make_optimizer: MakeOptimizer = adamw) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.steps = steps
        self._make_optimizer = make_optimizer

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.loss(batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out_loss", self.model.loss(batch), batch_size=len(batch))

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._make_optimizer(self, self.lr, 0.01)
        scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Windows(Dataset[Tensor]):
    """`count` windows, int64 [T + 1], at random positions that depend on the seed alone; window i belongs to step i // batch."""

    def __init__(self, data: Tensor, *, count: int, context: int, seed: int) -> None:
        self._data = data
        self._length = context + 1
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(len(data) - self._length, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    @override
    def __getitem__(self, index: int) -> Tensor:
        start = self._starts[index]
        return self._data[start : start + self._length].long()


class TextData(pl.LightningDataModule):
    """Training batches of a text, one epoch of `steps`; validation on fixed windows of a held-out part."""

    def __init__(self, data: bytes, shape: Shape, *, steps: int, seed: int) -> None:
        super().__init__()
        self.sha256 = sha256(data)
        tensor = to_tensor(data)
        self._batch = shape.batch
        self._train = Windows(
            tensor[:TRAIN_BYTES], count=steps * shape.batch, context=shape.context, seed=seed * 1000 + 7
        )
        self._held_out = Windows(
            tensor[HELD_OUT_FROM:], count=EVALUATION_WINDOWS, context=shape.context, seed=EVALUATION_SEED
        )

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._train, batch_size=self._batch)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._held_out, batch_size=32)


def untrained(shape: Shape, seed: int) -> GPT:
    """The model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(vocabulary=256, width=shape.width, heads=shape.heads, layers=shape.layers, context=shape.context)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return model


def pretrained(cache: Path, shape: Shape, recipe: PreTraining) -> GPT:
    """The model trained on Python's standard library: once on each machine, then read from the folder `cache`."""
    data = python_library()
    # Biases begin with random numbers too.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = GPT(vocabulary=256, width=shape.width, heads=shape.heads, layers=shape.layers, context=shape.context)
    identity = [[sha256(data), asdict(shape), asdict(recipe)], torch.__version__]
    path = cache / f"gpt-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.pt"
    cache.mkdir(parents=True, exist_ok=True)
    # Of concurrent runs one trains and the others wait.
    with open(cache / "pretraining.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _pretrain(model, to_tensor(data), shape, recipe)
            temporary = path.with_suffix(".part")
            torch.save(model.state_dict(), temporary)
            temporary.rename(path)
    model.load_state_dict(torch.load(path))
    return model


def _pretrain(model: GPT, data: Tensor, shape: Shape, recipe: PreTraining) -> None:
    generator = torch.Generator().manual_seed(recipe.seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    windows = Windows(data, count=recipe.steps * shape.batch, context=shape.context, seed=recipe.seed)
    module = GptModule(model, lr=recipe.lr, steps=recipe.steps)
    trainer = quiet_trainer(max_steps=recipe.steps, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(windows, batch_size=shape.batch))
