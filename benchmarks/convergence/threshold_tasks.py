"""Tasks that are learned suddenly, so that steps until an accuracy show the lag of weights. They need no files.

Multi-query associative recall (arXiv 2312.04927) and modular addition (arXiv 2201.02177).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.common.gpt import GPT
from benchmarks.convergence.corpus import sha256 as digest
from benchmarks.convergence.optimizers import MakeOptimizer

IGNORED = -100
"""Target of positions that no answer is expected at."""

Examples = tuple[Tensor, Tensor]
"""Tokens and next tokens [N, T]."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Examples and network of a task."""

    train: Callable[[int, torch.Generator], Examples]
    """Makes so many training examples."""
    held_out: Examples
    network: Callable[[], GPT]
    weight_decay: float = 0.01
    batch: int = 64


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def recall(*, pairs: int = 8, keys: int = 32, values: int = 32) -> Task:
    """Sequences of key-value pairs, then each key again in another order; the values after these are the answers."""

    def examples(n: int, generator: torch.Generator) -> Examples:
        k_NP = torch.rand(n, keys, generator=generator).argsort(1)[:, :pairs]
        v_NP = keys + torch.randint(values, (n, pairs), generator=generator)
        order = torch.rand(n, pairs, generator=generator).argsort(1)
        again = torch.stack([k_NP.gather(1, order), v_NP.gather(1, order)], 2).flatten(1)
        tokens = torch.cat([torch.stack([k_NP, v_NP], 2).flatten(1), again], 1)
        targets = tokens[:, 1:].clone()
        targets[:, : 2 * pairs] = IGNORED
        targets[:, 2 * pairs + 1 :: 2] = IGNORED
        return tokens[:, :-1], targets

    return Task(
        train=examples,
        held_out=examples(256, _generator()),
        network=lambda: GPT(vocabulary=keys + values, context=4 * pairs, width=64, heads=4, layers=2),
    )


def modular_addition(*, p: int = 31) -> Task:
    """a + b modulo p, from half of all pairs; the other half is learned long after the first (grokking)."""
    a, b = torch.arange(p).repeat_interleave(p), torch.arange(p).repeat(p)
    inputs, targets = torch.stack([a, b, torch.full_like(a, p)], 1), torch.full((p * p, 3), IGNORED)
    targets[:, 2] = (a + b) % p
    order = torch.randperm(p * p, generator=_generator())
    train, held_out = order[: p * p // 2], order[p * p // 2 :]

    def examples(n: int, generator: torch.Generator) -> Examples:
        chosen = train[torch.randint(len(train), (n,), generator=generator)]
        return inputs[chosen], targets[chosen]

    return Task(
        train=examples,
        held_out=(inputs[held_out], targets[held_out]),
        network=lambda: GPT(vocabulary=p + 1, context=3, width=128, heads=4, layers=1),
        weight_decay=1.0,
        batch=256,
    )


TASKS: dict[str, Callable[[], Task]] = {"recall": recall, "modular": modular_addition}


class ThresholdModule(pl.LightningModule):
    """Trains a task until the held-out accuracy of the weights, as the method shows them in training, reaches the threshold.

    Args:
        task: the task.
        lr: constant after a warm-up of 20 steps.
        make_optimizer: optimizer of the method, from parameters, learning rate and weight decay.
        seed: of the initial weights.
    """

    EVERY = 10
    """Steps between two measurements of the accuracy."""
    THRESHOLD = 0.99
    """Accuracy that counts as learned."""

    def __init__(self, task: Task, *, lr: float, make_optimizer: MakeOptimizer, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = task.network()
        self._task, self._lr, self._make_optimizer = task, lr, make_optimizer
        self.steps_to_threshold: int | None = None
        self.held_out_loss = float("nan")
        """At the last measurement."""

    def loss_and_accuracy(self, batch: Examples) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and share of right answers, 0-D."""
        inputs, targets = batch
        logits = self.network.logits(inputs).float()
        answered = targets != IGNORED
        right = (logits.argmax(-1) == targets)[answered].float().mean()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED), right

    @override
    def training_step(self, batch: Examples, batch_idx: int) -> Tensor:
        return self.loss_and_accuracy(batch)[0]

    @override
    def on_train_batch_end(self, outputs: object, batch: Examples, batch_idx: int) -> None:
        if self.trainer.global_step % self.EVERY:
            return
        with torch.no_grad():
            loss, accuracy = self.loss_and_accuracy(self._task.held_out)
        self.held_out_loss = float(loss)
        if float(accuracy) >= self.THRESHOLD:
            self.steps_to_threshold = self.trainer.global_step
            self.trainer.should_stop = True

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._make_optimizer(self, self._lr, self._task.weight_decay)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ThresholdData(pl.LightningDataModule):
    """Batches of a task, an epoch of `steps`."""

    def __init__(self, task: Task, *, steps: int, seed: int) -> None:
        super().__init__()
        self.sha256 = digest(b"".join(part.numpy().tobytes() for part in task.held_out))
        self._task, self._steps, self._seed = task, steps, seed

    def _batch(self, step: int) -> Examples:
        """A function of seed and step."""
        return self._task.train(self._task.batch, torch.Generator().manual_seed(1_000_003 * self._seed + step))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(self._steps), batch_size=None, collate_fn=self._batch)  # type: ignore[arg-type]
