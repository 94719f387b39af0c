"""Models whose gradients tests can compute without the trainer. All data is a function of the step, the micro-batch and the rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_zenflow.core.step_inputs import GroupHyperparameters

_Module = TypeVar("_Module", bound=nn.Module)


def generator(*key: int) -> torch.Generator:
    """A generator whose numbers depend on the key alone."""
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def decay(step: int) -> float:
    """Factor of learning rates in a step, counted from 0."""
    return 1 / (1 + 0.25 * step)


def hyperparameters(**given: Any) -> GroupHyperparameters:
    """Of AdamW, as torch has them but for the weight decay, which is 0."""
    defaults = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    return GroupHyperparameters(**{**defaults, **given})


def draw(module: _Module, key: int) -> _Module:
    """Gives a module's parameters random values that depend on the key alone."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(0.3 * torch.randn(p.shape, generator=generator(key, i)))
    return module


def small_net() -> nn.Sequential:
    """A network of 12 inputs and 6 outputs, for modules of users."""
    return draw(nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 6)), 3)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How the test models configure their optimizer."""

    kind: str = "AdamW"
    """Name of a class in `torch.optim`."""
    lr: float = 1e-2
    scheduler: bool = True
    factor: Callable[[int], float] = decay
    """The scheduler's."""
    given: Sequence[GroupHyperparameters] = ()
    """Of each parameter group; empty: two with nothing in common."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class."""

    def initial(self) -> Sequence[GroupHyperparameters]:
        """Hyperparameters that the optimizer is made with."""
        return self.given or [
            # No simple fraction: with 0.1, gradients and weights of few bits cancel exactly where Adam adds the decay to the gradient, and
            # the first step then goes in the direction of the rounding error.
            hyperparameters(lr=self.lr, weight_decay=0.0731),
            hyperparameters(lr=0.3 * self.lr, beta1=0.8, beta2=0.95, eps=1e-6),
        ]

    def groups(self, step: int) -> list[GroupHyperparameters]:
        """Hyperparameters in a step, counted from 0, for the oracle."""
        factor = self.factor(step) if self.scheduler else 1.0
        return [replace(h, lr=h.lr * factor, decoupled=self.kind != "Adam") for h in self.initial()]


class TestModule(pl.LightningModule):
    """Base of the models: two parameter groups, a scheduler, data loaders, the micro-batch's number.

    Subclasses define `loss`.

    Args:
        length: micro-batches in an epoch.
        accumulate: micro-batches in a step.
        optimizer: None: the defaults, with the class's own learning rate.
        frozen_in: steps, counted from 0, in which one of the `freezable` is frozen, [begin, end), by its number.
        micro: the micro-batch of these steps before which it is frozen and unfrozen.
    """

    __test__ = False  # pytest takes classes of this name for tests
    lr = 1e-2

    def __init__(
        self,
        *,
        length: int = 100,
        accumulate: int = 1,
        optimizer: OptimizerOptions | None = None,
        frozen_in: dict[int, tuple[int, int]] | None = None,
        micro: int = 0,
    ) -> None:
        super().__init__()
        self.length = length
        self.accumulate = accumulate
        self.optimizer_options = optimizer or OptimizerOptions(lr=self.lr)
        self.frozen_in = frozen_in or {}
        self.micro = micro
        self._trained: list[list[nn.Parameter]] = []

    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        """The loss of one micro-batch."""
        raise NotImplementedError

    def optimized(self) -> list[list[nn.Parameter]]:
        """What the optimizer gets, frozen or not: matrices, and everything else."""
        shapes = [(p, getattr(p, "ds_shape", p.shape)) for p in self.parameters()]
        return [[p for p, shape in shapes if (len(shape) > 1) == is_matrix] for is_matrix in (True, False)]

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Those of `optimized` with elements that were not frozen at the first call."""
        if not self._trained:
            self._trained = [[p for p in group if p.requires_grad and p.numel()] for group in self.optimized()]
        return self._trained

    def freezable(self) -> Sequence[Any]:
        """Modules or parameters that `frozen_in` counts."""
        return list(self.parameters())

    def is_frozen(self, index: int, step: int, micro: int) -> bool:
        """Whether one of the `freezable` is frozen in a micro-batch."""
        begin, end = self.frozen_in.get(index, (0, 0))
        return (begin, self.micro) <= (step, micro) < (end, self.micro)

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        step, micro = divmod(batch_idx, self.accumulate)
        for i in self.frozen_in:
            self.freezable()[i].requires_grad_(not self.is_frozen(i, step, micro))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.trainer.global_step, batch_idx % self.accumulate, self.trainer.global_rank)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(0, 0, 0)

    test_step = predict_step = validation_step

    def optimizer_and_scheduler(self) -> tuple[Any, Any]:
        """Those of `configure_optimizers`; None: no scheduler."""
        options = self.optimizer_options
        entries = [
            {"params": list(ps), "lr": h.lr, "betas": (h.beta1, h.beta2), "eps": h.eps, "weight_decay": h.weight_decay}
            for ps, h in zip(self.optimized(), options.initial(), strict=False)
        ]
        optimizer = getattr(torch.optim, options.kind)(entries, **options.flags)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, options.factor) if options.scheduler else None

    @override
    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.optimizer_and_scheduler()
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(self.length))  # the data itself is made in the training step

    @override
    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(1))

    test_dataloader = predict_dataloader = val_dataloader


SHAPES = ((31, 29), (8, 3, 3, 5), (53, 7), (37,), (3, 211), (1,), (5, 2, 2))
"""Of the parameters of `LinearLossModule`: prime sizes, so that ranks and blocks cut in mid-row."""


TINY = ((7, 5), (3,))
"""Of the smallest `LinearLossModule` that has columns to select."""


class LinearLossModule(TestModule):
    """loss = sum over parameters of sum(p * G): the gradient is G whatever the weights are.

    The last matrix is used by the first micro-batch of even steps only; elsewhere it has no gradient.

    Args:
        not_finite: value that gradients have at one element, by (step, rank).
        not_finite_in: number of the parameter with that element.
        factors: on the gradients of a step, NaN and infinity among them.
        ranks_differ: whether ranks see different data.
    """

    def __init__(
        self,
        *,
        not_finite: dict[tuple[int, int], float] | None = None,
        not_finite_in: int = 0,
        factors: dict[int, float] | None = None,
        ranks_differ: bool = True,
        shapes: Sequence[Sequence[int]] = SHAPES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator(1, i))) for i, shape in enumerate(shapes)
        )
        self.not_finite = not_finite or {}
        self.not_finite_in = not_finite_in
        self.factors = factors or {}
        self.ranks_differ = ranks_differ

    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        """float32 gradient of one micro-batch with respect to `self.weights[index]`, before the division by `accumulate`."""
        if (index == 6 and (step % 2 or micro)) or self.is_frozen(index, step, micro):
            return None
        shape = self.weights[index].shape
        numbers = torch.randn(shape, generator=generator(2, index, step, micro, rank if self.ranks_differ else 0))
        # Columns of very different size make the selection matter, steps of different size the clipping.
        columns = torch.logspace(-2, 0, shape[1] if len(shape) > 1 else 1).view(-1, *[1] * max(0, len(shape) - 2))
        gradient = numbers * (columns if len(shape) > 1 else 0.1) * (1 + step % 3)
        if index == self.not_finite_in and (step, rank) in self.not_finite:
            gradient.view(-1)[gradient.numel() // 2] = self.not_finite[step, rank]
        return gradient * self.factors.get(step, 1.0)

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
    def optimized(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]


class DeviceLinearLossModule(LinearLossModule):
    """As `LinearLossModule`, with gradients that are made where the weights are, so that large ones take no time of the host."""

    @override
    def gradient(self, index: int, step: int, micro: int, rank: int) -> Tensor | None:
        p = self.weights[index]
        seed = ((index * 1009 + step) * 1009 + micro) * 1009 + rank
        numbers = torch.randn(p.shape, device=p.device, generator=torch.Generator(p.device).manual_seed(seed))
        columns = torch.logspace(-2, 0, p.shape[1], device=p.device) if p.dim() == 2 else 0.1
        return numbers * columns * (1 + step % 3)
