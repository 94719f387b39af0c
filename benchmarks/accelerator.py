"""Models of the step-time benchmark: one whose forward and backward take a set time and no CPU, and a real GPT.

The first stands in for a model on an accelerator. Its layers hold real weights, so gradients, buckets and optimizer states are real; but
forward and backward sleep and hand out a prepared gradient. All cores are then left to the offload machinery, as they are beside a GPU.
What the device would do itself, DeepSpeed's bucket copies for instance, is charged to the CPU too: the method `floor` measures that.
"""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


class _Steps(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, index: int) -> int:
        return index


class TimedModule(pl.LightningModule):
    """Trains with AdamW on batches that are numbers of steps.

    Args:
        steps: how many batches there are.
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
        return DataLoader(_Steps(self._steps), batch_size=1)


class _Layer(torch.autograd.Function):
    """Sleeps, and returns the prepared gradient as the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.gradient, ctx.backward_s = gradient, backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        return outputs[0], ctx.gradient, None, None, None


class SimulatedAccelerator(TimedModule):
    """Layers of [4096, 1024] weights on a device that takes `compute_s` for forward and backward, a third and two thirds.

    Args:
        steps: how many batches there are.
        params: number of weights, rounded down to whole layers.
        compute_s: seconds a step.
    """

    def __init__(self, *, steps: int, params: float, compute_s: float) -> None:
        super().__init__(steps)
        shape = (4096, 1024)
        n_layers = max(1, int(params / (shape[0] * shape[1])))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for _ in range(n_layers))
        # Columns of different size, as real gradients have; a buffer, so that it takes the model's type.
        self.register_buffer("gradient", torch.randn(shape) * torch.logspace(-5, -3, shape[1]))
        self._forward_s, self._backward_s = compute_s / 3 / n_layers, compute_s * 2 / 3 / n_layers

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for weight in self.weights:
            x = _Layer.apply(x, weight, self.gradient, self._forward_s, self._backward_s)  # type: ignore[no-untyped-call]
        return x.float().sum()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


SHAPES = {25e6: (512, 8, 6), 150e6: (1024, 16, 11), 1.5e9: (2048, 16, 28), 3e9: (2560, 20, 37)}
"""Parameters, nearly: (width, heads, layers) of `Gpt`."""


class Gpt(TimedModule):
    """A GPT on random tokens.

    Args:
        steps: how many batches there are.
        params: a key of `SHAPES`.
        batch: sequences a step.
        tokens: length of a sequence.
        narrow: whether it has as many tensors as its size asks for, but hardly any weights: what then takes time are calls, not passes
            over memory.
    """

    def __init__(self, *, steps: int, params: float, batch: int, tokens: int, narrow: bool = False) -> None:
        super().__init__(steps)
        width, heads, layers = SHAPES[params]
        self._batch, self._tokens = batch, tokens
        self.vocabulary = 8192
        if narrow:
            width, self.vocabulary = 2 * heads, 64
        self.token, self.position = nn.Embedding(self.vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.vocabulary, bias=False)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(batch_idx)
        shape = (self._batch, self._tokens + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator, device=self.device)
        x = self.token(tokens[:, :-1]) + self.position.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
