"""A small transformer in a plain loop, with `OffloadAdamW` or with torch's AdamW."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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


def loss_of(model: nn.Module, number: int, batch_of: Callable[[int], Tensor] = batch) -> Tensor:
    """Cross entropy of the next tokens."""
    tokens = batch_of(number)
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
    """A training, which `train` goes on with. It does not wait for a device."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any = None
    masters: list[Tensor] = field(default_factory=list)
    """Float32 copies of the trained weights, which torch's AdamW updates where the model has fewer bits."""
    batch_of: Callable[[int], Tensor] = batch
    """Tokens where the model is."""
    scaler: torch.amp.GradScaler | None = None
    autocast: torch.dtype | None = None
    syncs: bool = True
    """Under FSDP2, whether each micro-batch is reduced, and not the last one of a step alone."""
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    steps: int = 0

    @property
    def trained(self) -> list[Tensor]:
        """Parameters, in the order of the optimizer."""
        return [p for group in groups_of(self.model) for p in group["params"]]

    def backward(self, number: int, *, share: int = 1, factor: float = 1.0) -> None:
        """Forward and backward pass of a batch, with the loss over `share`; `factor` is on its gradients only."""
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, self.autocast) if self.autocast else nullcontext():
            loss = loss_of(self.model, number, self.batch_of) / share
        self.losses.append(loss.detach())
        loss = loss if factor == 1.0 else loss * factor
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    @torch.no_grad()
    def end_step(self, max_norm: float | None = None) -> None:
        """Clips by torch's function, takes the step and drops gradients."""
        for master, p in zip(self.masters, self.trained, strict=bool(self.masters)):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if max_norm is not None:
            norm = clip_grad_norm_(self.masters or self.model.parameters(), max_norm)
            self.norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        self.optimizer.zero_grad()
        for master, p in zip(self.masters, self.trained, strict=bool(self.masters)):
            p.copy_(master)
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1

    def train(
        self,
        steps: int = 8,
        *,
        micro_batches: Callable[[int], int] = lambda _: 1,
        max_norm: Callable[[int], float | None] = lambda _: None,
        begin: Callable[["Loop"], None] = lambda _: None,
        infinite_in: Sequence[int] = (),
    ) -> "Loop":
        """Steps of a plain loop; in some the gradient is infinite."""
        for step in range(self.steps, self.steps + steps):
            begin(self)
            n, factor = micro_batches(step), float("inf") if step in infinite_in else 1.0
            for micro in range(n):
                if not self.syncs:
                    self.model.set_requires_gradient_sync(micro == n - 1)  # type: ignore[operator]  # FSDP2's
                self.backward(100 * step + micro, share=n, factor=factor)
            self.end_step(None if step in infinite_in else max_norm(step))
        return self

    def weights(self) -> list[Tensor]:
        """Copies of the model's weights."""
        return [p.detach().clone() for p in self.model.parameters()]


def make_loop(
    who: Who,
    *,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
    device: Any = "cpu",
    scheduled: bool = True,
    **keys: Any,
) -> Loop:
    """A training that has not begun."""
    model = (model or make_model(dtype)).to(device)
    groups, masters = groups_of(model), list[Tensor]()
    trained = [p for group in groups for p in group["params"]]
    if who == "torch" and trained[0].dtype != torch.float32:
        masters = [p.detach().float().requires_grad_() for p in trained]
        of_groups = iter(masters)
        groups = [{**group, "params": [next(of_groups) for _ in group["params"]]} for group in groups]
    optimizer = make_optimizer(who, groups, **keys)
    loop = Loop(model, optimizer, masters=masters)
    if device != "cpu":
        loop.batch_of = lambda number: batch(number).to(device)
    if scheduled:
        loop.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    return loop


def close(*loops: Loop) -> None:
    """Ends the workers."""
    for loop in loops:
        if isinstance(loop.optimizer, OffloadAdamW):
            loop.optimizer.close()
