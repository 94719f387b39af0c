"""Models of the step-time benchmark: a simulated accelerator and a real GPT.

Layers of the simulated accelerator hold real weights, so gradients, buckets and optimizer states are real. Forward and backward sleep and
return a prepared gradient: all cores are left to offloading, as beside a GPU. What the device would do itself, DeepSpeed's bucket
copies for instance, is charged to the CPU too; the method `floor` measures it. A synchronous accelerator computes nothing meanwhile, an
asynchronous one goes on computing, as a GPU does beside its copy engines.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.common.gpt import GPT
from benchmarks.common.provenance import ROOT
from lightning_zenflow.offload.resident import ResidentBlock


class TimedModule(pl.LightningModule):
    """Trains with AdamW on batches that are numbers of steps.

    Args:
        steps: number of batches.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self.optimizer_class: Any = torch.optim.AdamW

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=1e-4, weight_decay=0.01)
        # DeepSpeed's ZenFlow takes its learning rates from a scheduler.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(self._steps))  # type: ignore[arg-type]


class _SynchronousClock:
    """A device whose kernels the host waits for: work of the host between two kernels delays the second.

    Attributes:
        idle_at: time of `time.perf_counter` at which all kernels have ended.
    """

    def __init__(self) -> None:
        self.idle_at = 0.0

    def forward(self, seconds: float) -> None:
        """Runs a kernel of the forward pass."""
        time.sleep(seconds)

    def backward(self, seconds: float) -> None:
        """Runs a kernel of the backward pass."""
        time.sleep(seconds)

    def update(self, seconds: float) -> None:
        """Runs a kernel of the optimizer, whose results nothing on the host waits for."""
        time.sleep(seconds)


class _AsynchronousClock(_SynchronousClock):
    """A device that has a queue of kernels: it computes one after the other, whatever the host does.

    The forward pass is enqueued when the host gets there, the backward pass right behind it. The host waits only for a kernel of the
    backward pass, whose gradient it takes.
    """

    @override
    def forward(self, seconds: float) -> None:
        self.idle_at = max(self.idle_at, time.perf_counter()) + seconds

    @override
    def backward(self, seconds: float) -> None:
        self.idle_at += seconds
        time.sleep(max(0.0, self.idle_at - time.perf_counter()))

    update = forward


Times = tuple[float, float]
"""Seconds of a layer's forward and backward pass."""


class _Compute(torch.autograd.Function):
    """Takes the device's time, and returns the prepared gradient as the weight's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, clock: _SynchronousClock, times: Times
    ) -> Tensor:
        ctx.gradient, ctx.clock, (forward_s, ctx.backward_s) = gradient, clock, times
        clock.forward(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        ctx.clock.backward(ctx.backward_s)
        # A tensor of its own, so that autograd keeps it without a copy.
        return outputs[0], ctx.gradient.detach(), None, None, None


class _Layer(nn.Module):
    """A weight matrix: a module, before which stage 3 fetches it.

    Args:
        rows: of the matrix.
        computes: whether it takes time.
    """

    def __init__(self, rows: int, *, computes: bool) -> None:
        super().__init__()
        self.rows, self.computes = rows, computes
        self.weight = nn.Parameter(torch.randn(rows, COLUMNS) * 0.02)

    @override
    def forward(self, x: Tensor, gradient: Tensor, clock: _SynchronousClock, times: Times) -> Any:
        times = times if self.computes else (0.0, 0.0)
        return _Compute.apply(x, self.weight, gradient[: self.rows], clock, times)  # type: ignore[no-untyped-call]


RESIDENT_BYTES = 28
"""That the update of a resident parameter reads and writes: three numbers in 32 bits both ways, gradient and weight in 16."""


@contextmanager
def updates_on(clock: _SynchronousClock, bytes_per_s: float) -> Iterator[None]:
    """Context in which the update of resident blocks takes the device's time, for so much memory traffic, and none of the host's cores.

    The update itself is left out, since the simulated device does not read weights: a timed run does not have AdamW's state. That no bit
    of it depends on the owner is for tests.
    """

    def step(block: ResidentBlock, *_: Any) -> None:
        clock.update(RESIDENT_BYTES * block.gradient.numel() / bytes_per_s)

    with mock.patch.object(ResidentBlock, "step", step):
        yield


ROWS, COLUMNS = 4096, 1024
"""Of a layer's weights."""

_EMBEDDING_SHARE = 0.15

PART_OF_STEP = {"step": 1.0, "backward": 2 / 3}
"""Of the time that a step computes."""


class SimulatedAccelerator(TimedModule):
    """Layers of [4096, 1024] weights on a device that takes `compute_s` for forward and backward, a third and two thirds.

    Args:
        steps: number of batches.
        params: number of weights, rounded down to whole layers.
        compute_s: seconds a step.
        embedding: make the first layer an embedding of 15 % of the weights, which takes no time to compute; its gradient comes last.
        asynchronous: the device computes while the host works.
        large_every: steps from one in which the half of the gradients that comes last is ten times as large, so that the whole norm cannot
            be foretold, to the next; 0: none. With 150e6 weights the norm is 4, or then 29.
    """

    gradient: Tensor
    large: Tensor

    def __init__(
        self,
        *,
        steps: int,
        params: float,
        compute_s: float,
        embedding: bool = False,
        asynchronous: bool = False,
        large_every: int = 0,
    ) -> None:
        super().__init__(steps)
        n_layers = max(1 + embedding, int(params / (ROWS * COLUMNS)))
        n_embedding = max(1, round(_EMBEDDING_SHARE * n_layers)) if embedding else 0
        n_layers -= n_embedding
        embeddings = [_Layer(n_embedding * ROWS, computes=False)] * embedding
        self.layers = nn.ModuleList([*embeddings, *(_Layer(ROWS, computes=True) for _ in range(n_layers))])
        # Columns of different norms, as in real gradients; buffers, so that they take the model's dtype.
        gradient = torch.randn(max(n_embedding, 1) * ROWS, COLUMNS) * torch.logspace(-5, -3, COLUMNS)
        self.register_buffer("gradient", gradient)
        self.register_buffer("large", 10 * gradient if large_every else None)
        self._large_every = large_every
        self.clock = _AsynchronousClock() if asynchronous else _SynchronousClock()
        layer_s = compute_s / n_layers
        backward_s = PART_OF_STEP["backward"] * layer_s
        self._times = layer_s - backward_s, backward_s

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for number, layer in enumerate(self.layers):
            x = layer(x, self._gradient(number, batch_idx), self.clock, self._times)
        return x.float().sum()

    def _gradient(self, layer: int, step: int) -> Tensor:
        is_last_half, every = 2 * layer < len(self.layers), self._large_every
        return self.large if every and step % every == every - 1 and is_last_half else self.gradient


SHAPES = {25e6: (512, 8, 6), 150e6: (1024, 16, 11), 1.5e9: (2048, 16, 28), 3e9: (2560, 20, 37), 7e9: (4096, 32, 32)}
"""Approximate number of parameters -> (width, heads, layers) of `TimedGpt`."""

_TEXT = ROOT / "examples/data/alpaca/train.json"


@cache
def _text(device: torch.device) -> Tensor:
    """The bundled instructions as tokens: their bytes, int64."""
    return torch.frombuffer(bytearray(_TEXT.read_bytes()), dtype=torch.uint8).to(device, torch.int64)


class _Recomputed(nn.Module):
    """A block that keeps only its input and computes the rest again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    @override
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class TimedGpt(TimedModule):
    """A GPT on random tokens, or on text.

    Args:
        steps: number of batches.
        params: a key of `SHAPES`.
        batch: sequences in a step.
        tokens: length of a sequence.
        narrow: keep all tensors but hardly any weights: calls take the time then, not passes over memory.
        recompute: activation checkpointing of each block.
        text: train on the bundled instructions, of which a model can learn something.
    """

    def __init__(
        self,
        *,
        steps: int,
        params: float,
        batch: int,
        tokens: int,
        narrow: bool = False,
        recompute: bool = False,
        text: bool = False,
    ) -> None:
        super().__init__(steps)
        self._is_text = text
        width, heads, layers = SHAPES[params]
        self._batch, self._tokens = batch, tokens
        width, vocabulary = (2 * heads, 256 if text else 64) if narrow else (width, 8192)
        self.model = GPT(vocabulary=vocabulary, width=width, heads=heads, layers=layers, context=tokens)
        if recompute:
            self.model.blocks = nn.Sequential(*map(_Recomputed, self.model.blocks))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(batch_idx)
        if self._is_text:
            windows = _text(self.device).unfold(0, self._tokens + 1, 1)
            tokens = windows[torch.randint(len(windows), (self._batch,), generator=generator, device=self.device)]
        else:
            shape = (self._batch, self._tokens + 1)
            tokens = torch.randint(self.model.vocabulary, shape, generator=generator, device=self.device)
        return self.model.loss(tokens)
