"""Tasks that are learned suddenly, so that steps until an accuracy show the lag of weights. They need no files.

Multi-query associative recall (arXiv 2312.04927), modular addition (arXiv 2201.02177), addition of decimal numbers, MNIST-1D (arXiv
2011.14439) and scikit-learn's digits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.common.gpt import GPT
from benchmarks.convergence.corpus import sha256 as digest
from benchmarks.convergence.optimizers import MakeOptimizer

IGNORED = -100
"""Target of positions that no answer is expected at."""

Examples = tuple[Tensor, Tensor]
"""Inputs and targets: tokens and next tokens [N, T], or features [N, F] and classes [N]."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Examples and network of a task."""

    train: Callable[[int, torch.Generator], Examples]
    """Makes so many training examples."""
    held_out: Examples
    network: Callable[[], nn.Module]
    """Features or tokens -> logits [..., classes]."""
    threshold: float
    """Accuracy that counts as learned."""
    weight_decay: float = 0.01
    batch: int = 64


class _NextTokens(nn.Module):
    """A GPT's logits."""

    def __init__(self, *, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary=vocabulary, width=width, heads=4, layers=layers, context=context)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt.logits(tokens)


class _Perceptron(nn.Sequential):
    def __init__(self, features: int, *, width: int, classes: int = 10) -> None:
        super().__init__(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
        )


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
        network=lambda: _NextTokens(vocabulary=keys + values, context=4 * pairs, width=64, layers=2),
        threshold=0.99,
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
        network=lambda: _NextTokens(vocabulary=p + 1, context=3, width=128, layers=1),
        threshold=0.99,
        weight_decay=1.0,
        batch=256,
    )


def addition(*, digits: int = 3) -> Task:
    """Sums of two decimal numbers, least significant digit first."""
    plus, equals = 10, 11

    def examples(n: int, generator: torch.Generator) -> Examples:
        a, b = torch.randint(10**digits, (2, n), generator=generator)

        def written(value: Tensor, length: int) -> Tensor:
            return torch.stack([value // 10**i % 10 for i in range(length)], 1)

        sign, end = torch.full((n, 1), plus), torch.full((n, 1), equals)
        tokens = torch.cat([written(a, digits), sign, written(b, digits), end, written(a + b, digits + 1)], 1)
        targets = tokens[:, 1:].clone()
        targets[:, : 2 * digits + 1] = IGNORED
        return tokens[:, :-1], targets

    return Task(
        train=examples,
        held_out=examples(512, _generator()),
        network=lambda: _NextTokens(vocabulary=12, context=3 * digits + 3, width=96, layers=2),
        threshold=0.99,
    )


_STROKES = torch.tensor(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
"""Outlines of the ten digits, of MNIST-1D."""


def mnist_1d(*, length: int = 40) -> Task:
    """Outlines of digits, scaled, shifted, sheared and with noise, at `length` points."""
    outlines = (_STROKES - 5) / 2

    def examples(n: int, generator: torch.Generator) -> Examples:
        classes = torch.randint(10, (n,), generator=generator)
        scale, shift, shear = torch.rand(3, n, 1, generator=generator)
        x_NL = torch.linspace(0, 1, length).expand(n, length)
        # Half of the line holds the digit, from `shift` on.
        position = (x_NL - 0.5 * shift) / 0.5 * (outlines.shape[1] - 1)
        inside = (position >= 0) & (position <= outlines.shape[1] - 1)
        left = position.clamp(0, outlines.shape[1] - 2).floor()
        low, high = (outlines[classes].gather(1, left.long() + i) for i in (0, 1))
        value = torch.where(inside, low + (position - left) * (high - low), 0.0) * (0.6 + 0.8 * scale)
        noise_NL = 0.25 * torch.randn(n, length, generator=generator)
        correlated = F.avg_pool1d(noise_NL.unsqueeze(1), 5, stride=1, padding=2).squeeze(1)
        return value + (shear - 0.5) * (x_NL - 0.5) + correlated + 0.2 * noise_NL, classes

    return Task(
        train=examples,
        held_out=examples(1000, _generator()),
        network=lambda: _Perceptron(length, width=128),
        threshold=0.9,
    )


def scikit_digits() -> Task:
    """The 1,797 images of digits that scikit-learn brings along; a quarter is held out."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    features, classes = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long()
    order = torch.randperm(len(classes), generator=_generator())
    n_train = 3 * len(classes) // 4
    train, held_out = order[:n_train], order[n_train:]

    def examples(n: int, generator: torch.Generator) -> Examples:
        chosen = train[torch.randint(len(train), (n,), generator=generator)]
        return features[chosen], classes[chosen]

    return Task(
        train=examples,
        held_out=(features[held_out], classes[held_out]),
        network=lambda: _Perceptron(features.shape[1], width=128),
        threshold=0.96,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "recall": recall,
    "modular": modular_addition,
    "addition": addition,
    "mnist1d": mnist_1d,
    "digits": scikit_digits,
}


class _Examples(Dataset[Examples]):
    """Batches by step, each a function of seed and step."""

    def __init__(self, task: Task, *, steps: int, seed: int) -> None:
        self._task, self._steps, self._seed = task, steps, seed

    def __len__(self) -> int:
        return self._steps

    @override
    def __getitem__(self, index: int) -> Examples:
        if index >= self._steps:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index)
        return self._task.train(self._task.batch, generator)


def _only(batches: list[Examples]) -> Examples:
    """The only one; a loader's batch is a batch already."""
    return batches[0]


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
        logits = self.network(inputs if not inputs.is_floating_point() else inputs.to(self.dtype)).float()
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
        if float(accuracy) >= self._task.threshold:
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
        self._task = task
        self._train = _Examples(task, steps=steps, seed=seed)

    @override
    def train_dataloader(self) -> DataLoader[Examples]:
        return DataLoader(self._train, collate_fn=_only)
