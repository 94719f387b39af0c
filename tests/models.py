"""Models whose gradients tests can compute without the trainer. All data is a function of the step, the micro-batch and the rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from reference import Group


def generator(*key: int) -> torch.Generator:
    """A generator whose numbers depend on the key alone."""
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def learning_rate_factor(step: int) -> float:
    """What the scheduler multiplies learning rates with in a step, counted from 0."""
    return 1 / (1 + 0.25 * step)


class Indexes(Dataset[int]):
    """0, 1, 2, ...: the data itself is made in the training step."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How the test models configure their optimizer: two parameter groups with nothing in common."""

    kind: str = "AdamW"
    """Name of a class in `torch.optim`, or "DeepSpeedCPUAdam"."""
    lr: float = 1e-2
    scheduler: bool = True

    def groups(self, step: int) -> list[Group]:
        """What the oracle needs to know of a step, counted from 0."""
        factor = learning_rate_factor(step) if self.scheduler else 1.0
        decoupled = self.kind != "Adam"
        return [
            # No simple fraction: with 0.1, gradients and weights of few bits cancel exactly where Adam adds the decay to the gradient, and
            # the first step then goes in the direction of the rounding error.
            Group(lr=self.lr * factor, weight_decay=0.0731, decoupled=decoupled),
            Group(lr=0.3 * self.lr * factor, beta1=0.8, beta2=0.95, eps=1e-6, decoupled=decoupled),
        ]


class TestModule(pl.LightningModule):
    """What the models have in common: two parameter groups, a scheduler, data loaders, the micro-batch's number.

    Subclasses define `loss`.
    """

    __test__ = False  # pytest takes classes of this name for tests

    def __init__(self, *, length: int, accumulate: int, optimizer: OptimizerOptions) -> None:
        super().__init__()
        self.length = length
        self.accumulate = accumulate
        self.optimizer_options = optimizer

    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        """The loss of one micro-batch."""
        raise NotImplementedError

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Matrices, and everything else."""
        parameters = list(self.parameters())
        return [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.trainer.global_step, batch_idx % self.accumulate, self.trainer.global_rank)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(0, 0, 0)

    @override
    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(0, 0, 0)

    @override
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(0, 0, 0)

    @override
    def configure_optimizers(self) -> Any:
        options = self.optimizer_options
        groups = [
            {
                "params": parameters,
                "lr": h.lr,
                "betas": (h.beta1, h.beta2),
                "eps": h.eps,
                "weight_decay": h.weight_decay,
            }
            for parameters, h in zip(self.parameter_groups(), options.groups(0), strict=True)
        ]
        optimizer = (DeepSpeedCPUAdam if options.kind == "DeepSpeedCPUAdam" else getattr(torch.optim, options.kind))(
            groups
        )
        if not options.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Indexes(self.length))

    @override
    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(Indexes(1))

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


SHAPES = ((31, 29), (8, 3, 3, 5), (53, 7), (37,), (3, 211), (1,), (5, 2, 2))
"""Of the parameters of `LinearLossModule`: prime sizes, so that ranks and blocks cut in mid-row."""


class LinearLossModule(TestModule):
    """loss = sum over parameters of sum(p * G): the gradient is G whatever the weights are.

    The last matrix is used by the first micro-batch of even steps only; elsewhere it has no gradient.

    Args:
        not_finite: value that gradients have at one element, by (step, rank).
        ranks_differ: whether ranks see different data.
    """

    def __init__(
        self,
        *,
        length: int = 100,
        accumulate: int = 1,
        optimizer: OptimizerOptions | None = None,
        not_finite: dict[tuple[int, int], float] | None = None,
        ranks_differ: bool = True,
        shapes: Sequence[Sequence[int]] = SHAPES,
    ) -> None:
        super().__init__(length=length, accumulate=accumulate, optimizer=optimizer or OptimizerOptions())
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator(1, i))) for i, shape in enumerate(shapes)
        )
        self.not_finite = not_finite or {}
        self.ranks_differ = ranks_differ

    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        """float32 gradient of one micro-batch with respect to `self.weights[index]`, before the division by `accumulate`."""
        if index == 6 and (step % 2 or micro):
            return None
        shape = self.weights[index].shape
        numbers = torch.randn(shape, generator=generator(2, index, step, micro, rank if self.ranks_differ else 0))
        # Columns of very different size make the selection matter, steps of different size the clipping.
        columns = torch.logspace(-2, 0, shape[1] if len(shape) > 1 else 1).view(-1, *[1] * max(0, len(shape) - 2))
        gradient = numbers * (columns if len(shape) > 1 else 0.1) * (1 + step % 3)
        if index == 0 and (step, rank) in self.not_finite:
            gradient[2, 3] = self.not_finite[step, rank]
        return gradient

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        total = torch.zeros(())
        for i, p in enumerate(self.weights):
            gradient = self.gradient(i, step, micro, rank)
            if gradient is not None:
                total = total + (p.float() * gradient.to(p.device)).sum()
        return total


class OneGroup(LinearLossModule):
    """As `LinearLossModule`, with one parameter group."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class HostileModule(LinearLossModule):
    """As `LinearLossModule`, with a loss that is multiplied by a factor in some steps.

    Args:
        factors: by step; NaN and infinity among them.
        ranks: on which ranks; None: all.
        **options: as `LinearLossModule`.
    """

    def __init__(self, *, factors: dict[int, float], ranks: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.factors = factors
        self.hostile_ranks = ranks

    @override
    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        gradient = super().gradient(index, step, micro, rank)
        if gradient is None or (self.hostile_ranks is not None and rank not in self.hostile_ranks):
            return gradient
        return gradient * self.factors.get(step, 1.0)


class DeviceLinearLossModule(LinearLossModule):
    """As `LinearLossModule`, with gradients that are made where the weights are, so that large ones take no time of the host."""

    @override
    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        p = self.weights[index]
        seed = ((index * 1009 + step) * 1009 + micro) * 1009 + rank
        numbers = torch.randn(p.shape, device=p.device, generator=torch.Generator(p.device).manual_seed(seed))
        columns = torch.logspace(-2, 0, p.shape[1], device=p.device) if p.dim() == 2 else 0.1
        return numbers * columns * (1 + step % 3)


class Perceptron(TestModule):
    """Linear layers with GELU between them, on inputs that are made where the weights are.

    Args:
        widths: of the layers, from input to output.
        batch_size: rows of an input.
    """

    def __init__(
        self,
        *,
        widths: Sequence[int],
        length: int = 100,
        accumulate: int = 1,
        optimizer: OptimizerOptions | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__(length=length, accumulate=accumulate, optimizer=optimizer or OptimizerOptions(lr=1e-3))
        self.batch_size = batch_size
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator(7, i)) / p.shape[-1] ** 0.5)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        weight = self.layers[0].weight
        g = torch.Generator(weight.device).manual_seed((step * 1009 + micro) * 1009 + rank)
        x = torch.randn(self.batch_size, weight.shape[1], generator=g, device=weight.device).to(weight.dtype)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.float().square().mean()


class FreezingModule(LinearLossModule):
    """As `LinearLossModule`, with parameters that are frozen for some of the steps.

    Args:
        frozen_in: steps, counted from 0, in which a parameter is frozen, [begin, end), by its number.
        micro: the micro-batch of these steps before which it is frozen and unfrozen.
        **options: as `LinearLossModule`.
    """

    def __init__(self, *, frozen_in: dict[int, tuple[int, int]], micro: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.frozen_in = frozen_in
        self.micro = micro

    def is_frozen(self, index: int, step: int, micro: int) -> bool:
        begin, end = self.frozen_in.get(index, (0, 0))
        return (begin, self.micro) <= (step, micro) < (end, self.micro)

    def is_left_alone(self, index: int, step: int) -> bool:
        """Whether the whole step does without the parameter: what it is when the step begins."""
        return self.is_frozen(index, step, 0)

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        step, micro = divmod(batch_idx, self.accumulate)
        for i, p in enumerate(self.weights):
            p.requires_grad_(not self.is_frozen(i, step, micro))

    @override
    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        return None if self.is_frozen(index, step, micro) else super().gradient(index, step, micro, rank)


class SmallNet(TestModule):
    """A classifier: embedding, convolution, normalisation and two linear layers, all of them nonlinear in between.

    Args:
        batch_size: rows of an input.
        ranks_differ: whether ranks see different data.
    """

    def __init__(
        self,
        *,
        length: int = 100,
        accumulate: int = 1,
        optimizer: OptimizerOptions | None = None,
        batch_size: int = 4,
        ranks_differ: bool = True,
    ) -> None:
        super().__init__(length=length, accumulate=accumulate, optimizer=optimizer or OptimizerOptions(lr=3e-3))
        self.batch_size = batch_size
        self.ranks_differ = ranks_differ
        self.embedding = nn.Embedding(23, 13)
        self.convolution = nn.Conv2d(1, 5, 3, padding=1)
        self.hidden = nn.Linear(5 * 7 * 13, 11)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 3)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator(3, i)))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        g = generator(4, step, micro, rank if self.ranks_differ else 0)
        tokens = torch.randint(23, (self.batch_size, 7), generator=g).to(self.device)
        x = self.embedding(tokens).unsqueeze(1)
        x = torch.tanh(self.convolution(x)).flatten(1)
        logits = self.head(functional.gelu(self.norm(self.hidden(x))))
        return functional.cross_entropy(logits.float(), tokens.sum(1) % 3)


class TiedNet(TestModule):
    """A language model in small: the embedding's matrix is the head's as well, between them three residual layers.

    Args:
        checkpoint: layers whose activations are computed again in backward: none (""), "reentrant" or "non-reentrant" checkpointing.
        head_in_checkpoint: whether the head, and with it a matrix that is used outside too, is computed again as well.
        shared: whether the second layer is the first one once more.
        frozen: layers that are frozen from the start.
        frozen_in: steps, counted from 0, in which a layer is frozen, [begin, end), by its number.
        used_every: a step in so many uses the last layer; 0: none does.
    """

    def __init__(
        self,
        *,
        length: int = 100,
        accumulate: int = 1,
        optimizer: OptimizerOptions | None = None,
        checkpoint: str = "",
        head_in_checkpoint: bool = False,
        shared: bool = False,
        frozen: Sequence[int] = (),
        frozen_in: dict[int, tuple[int, int]] | None = None,
        used_every: int = 1,
    ) -> None:
        super().__init__(length=length, accumulate=accumulate, optimizer=optimizer or OptimizerOptions(lr=3e-3))
        self.checkpoint = checkpoint
        self.head_in_checkpoint = head_in_checkpoint
        self.shared = shared
        self.frozen_in = frozen_in or {}
        self.used_every = used_every
        self.embedding = nn.Embedding(19, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 19)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator(5, i)))
        for layer in frozen:
            self.layers[layer].requires_grad_(False)
        trained = [p for p in self.parameters() if p.requires_grad]
        self.trained_groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]
        self.frozen_from_start = [p for p in self.parameters() if not p.requires_grad]
        self.frozen_weights: list[Tensor] = []

    @override
    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Those that were not frozen at the start."""
        return self.trained_groups

    def frozen_at(self, step: int) -> set[nn.Parameter]:
        """Of those, the ones that are frozen in a step."""
        layers = [self.layers[layer] for layer, (begin, end) in self.frozen_in.items() if begin <= step < end]
        return {p for layer in layers for p in layer.parameters()}

    @override
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        # As in a model that gives its optimizer everything, frozen or not.
        configured["optimizer"].param_groups[0]["params"].extend(self.frozen_from_start)
        return configured

    @override
    def on_train_start(self) -> None:
        self.frozen_weights = [p.detach().clone() for p in self.frozen_from_start]

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        frozen = self.frozen_at(batch_idx // self.accumulate)
        for p in (p for group in self.trained_groups for p in group):
            p.requires_grad_(p not in frozen)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        for p, before in zip(self.frozen_from_start, self.frozen_weights, strict=True):
            assert torch.equal(p, before), "a frozen parameter has moved"

    def maybe_checkpointed(self, function: Any, x: Tensor) -> Tensor:
        if not self.checkpoint:
            return function(x)
        result = checkpoint(function, x, use_reentrant=self.checkpoint == "reentrant")
        assert isinstance(result, Tensor)
        return result

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        g = generator(6, step, micro, rank)
        tokens = torch.randint(19, (3, 8), generator=g).to(self.device)
        x = self.embedding(tokens[:, :-1])
        layers = [self.layers[0], self.layers[0 if self.shared else 1], self.layers[2]]
        if self.used_every == 0 or step % self.used_every:
            layers.pop()
        for layer in layers:
            x = x + self.maybe_checkpointed(layer, x)
        logits = self.maybe_checkpointed(self.head, x) if self.head_in_checkpoint else self.head(x)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
