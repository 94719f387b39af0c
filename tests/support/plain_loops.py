"""A small transformer in a plain loop, with `OffloadAdamW` or with torch's AdamW."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_zenflow import OffloadAdamW
from lightning_zenflow.telemetry import Reading

Who = Literal["ours", "torch"]
TOKENS, WIDTH = 50, 32


def make_model(dtype: torch.dtype = torch.float32, *, layers: int = 3) -> nn.Sequential:
    """An embedding, transformer layers and a head, the same in each call."""
    torch.manual_seed(0)
    encoder = [
        nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, dtype=dtype) for _ in range(layers)
    ]
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH, dtype=dtype), *encoder, nn.Linear(WIDTH, TOKENS, dtype=dtype))
    # Of the keys' biases the gradient is rounding noise, which AdamW makes steps of full size of.
    for layer in encoder:
        layer.self_attn.in_proj_bias.requires_grad_(False)
    return model


def batch(number: int) -> Tensor:
    """Tokens [4, 9], a function of the number."""
    return torch.randint(TOKENS, (4, 9), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Cross entropy of the next tokens."""
    tokens = batch(number)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and vectors without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(who: Who, params: Iterable[Any], **keys: Any) -> Optimizer:
    """The optimizer of a side."""
    if who == "torch":
        keys = {key: keys[key] for key in ("lr", "betas", "weight_decay") if key in keys}
        return torch.optim.AdamW(params, **{"lr": 1e-2, **keys})
    return OffloadAdamW(params, **{"lr": 1e-2, "worker_cores": 1, **keys})


def reading_of(optimizer: Optimizer) -> Reading:
    """Counters of an `OffloadAdamW`."""
    assert isinstance(optimizer, OffloadAdamW)
    reading = optimizer.telemetry
    assert reading is not None
    return reading


@dataclass
class Loop:
    """A training, which `train` goes on with."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    steps: int = 0

    def train(
        self,
        steps: int = 8,
        *,
        micro_batches: Callable[[int], int] = lambda _: 1,
        max_norm: Callable[[int], float] | None = None,
        begin: Callable[["Loop"], None] = lambda _: None,
    ) -> "Loop":
        """Steps of a plain loop, with torch's own clipping."""
        for step in range(self.steps, self.steps + steps):
            begin(self)
            n = micro_batches(step)
            for micro in range(n):
                loss = loss_of(self.model, 100 * step + micro) / n
                loss.backward()
                self.losses.append(float(loss.detach()))
            if max_norm is not None:
                self.norms.append(float(clip_grad_norm_(self.model.parameters(), max_norm(step))))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.steps += 1
        return self

    def weights(self) -> list[Tensor]:
        """Copies of the model's weights."""
        return [p.detach().clone() for p in self.model.parameters()]


def make_loop(who: Who, *, dtype: torch.dtype = torch.float32, model: nn.Module | None = None, **keys: Any) -> Loop:
    """A training that has not begun."""
    model = model or make_model(dtype)
    optimizer = make_optimizer(who, groups_of(model), **keys)
    return Loop(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10)))


def close(*loops: Loop) -> None:
    """Ends the workers."""
    for loop in loops:
        with suppress(AttributeError):
            loop.optimizer.close()  # type: ignore[attr-defined]  # ours
