"""Models that are networks, whose gradients depend on their weights. Data as in `models`."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from models import TestModule, draw, generator


class Perceptron(TestModule):
    """Linear layers with GELU between them, on inputs that are made where the weights are.

    Args:
        widths: of the layers, from input to output.
    """

    lr = 1e-3

    def __init__(self, *, widths: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator(7, i)) / p.shape[-1] ** 0.5)

    def through(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Output of a layer."""
        return functional.gelu(layer(x))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        weight = self.layers[0].weight
        g = torch.Generator(weight.device).manual_seed((step * 1009 + micro) * 1009 + rank)
        x = torch.randn(8, weight.shape[1], generator=g, device=weight.device).to(weight.dtype)
        for layer in self.layers:
            x = self.through(layer, x)
        return x.float().square().mean()


class Deep(TestModule):
    """Equal layers, one after the other, which are made in pieces, so that they never are on a rank together; keeps the losses.

    Args:
        n_layers: their number.
        width: of each.
        used_again: whether the first layer's weight, by itself, is used in the end as well.
        dtype: of the inputs, which is that of the weights.
    """

    lr = 3e-4

    def __init__(
        self, *, n_layers: int, width: int, used_again: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.n_layers, self.width, self.used_again, self.of_inputs = n_layers, width, used_again, dtype
        self.losses: list[Tensor] = []

    @override
    def configure_model(self) -> None:
        # Lightning asks again before each run.
        if hasattr(self, "layers"):
            return
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width, bias=False) for _ in range(self.n_layers))

    @override
    def optimized(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        data = torch.randn(4, self.width, generator=generator(9)).to(self.device, self.of_inputs)
        x = data
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / self.n_layers
        if self.used_again:
            x = functional.linear(x, self.layers[0].weight)
        loss = (x - data.roll(1, 1)).float().square().mean()
        self.losses.append(loss.detach())
        return loss


class _AllAtOnce(torch.autograd.Function):
    """A layer whose input, weight and bias get their gradients together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return functional.gelu(functional.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        function = lambda x, weight, bias: functional.gelu(functional.linear(x, weight, bias))  # noqa: E731
        return torch.autograd.functional.vjp(function, ctx.saved_tensors, *gradients)[1]


class PerceptronAtOnce(Perceptron):
    """As `Perceptron`; each layer's gradients arrive together, as those of compiled layers do."""

    @override
    def through(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return _AllAtOnce.apply(x, layer.weight, layer.bias)


class SmallNet(TestModule):
    """A classifier: embedding, convolution, normalisation and two linear layers, all of them nonlinear in between.

    Args:
        ranks_differ: whether ranks see different data.
    """

    lr = 3e-3

    def __init__(self, *, ranks_differ: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.ranks_differ = ranks_differ
        self.embedding = nn.Embedding(23, 13)
        self.convolution = nn.Conv2d(1, 5, 3, padding=1)
        self.hidden = nn.Linear(5 * 7 * 13, 11)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 3)
        draw(self, 3)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        g = generator(4, step, micro, rank if self.ranks_differ else 0)
        tokens = torch.randint(23, (4, 7), generator=g).to(self.device)
        x = self.embedding(tokens).unsqueeze(1)
        x = torch.tanh(self.convolution(x)).flatten(1)
        logits = self.head(functional.gelu(self.norm(self.hidden(x))))
        return functional.cross_entropy(logits.float(), tokens.sum(1) % 3)


class FrozenInPart(SmallNet):
    """Uses the head once while it is frozen; autograd does so last, behind the head's gradient."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        self.head.requires_grad_(False)
        early = self.head(self.hidden.bias).square().sum()
        self.head.requires_grad_(True)
        return super().loss(step, micro, rank) + early


class ByHand(SmallNet):
    """As `SmallNet`, in manual optimization: accumulates by steps that are left out, clips and schedules, all in the step's closure.

    Args:
        max_norm: largest norm of a gradient.
    """

    def __init__(self, *, max_norm: float, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.max_norm = max_norm

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = torch.empty(0)
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % self.accumulate == 0

        def backward() -> None:
            nonlocal loss
            loss = super(ByHand, self).training_step(batch, batch_idx) / self.accumulate
            self.manual_backward(loss)
            if is_last:
                self.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")

        if not is_last:
            backward()
        else:
            optimizer.step(backward)
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return loss


class TiedNet(TestModule):
    """A language model in small: the embedding's matrix is the head's as well, between them three residual layers.

    Args:
        checkpoint: layers whose activations are computed again in backward: none (""), "reentrant" or "non-reentrant" checkpointing.
        head_in_checkpoint: whether the head, and with it a matrix that is used outside too, is computed again as well.
        shared: whether the second layer is the first one once more.
        frozen: layers that are frozen from the start.
        used_every: a step in so many uses the last layer; 0: none does.
    """

    lr = 3e-3

    def __init__(
        self,
        *,
        checkpoint: str = "",
        head_in_checkpoint: bool = False,
        shared: bool = False,
        frozen: Sequence[int] = (),
        used_every: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.checkpoint = checkpoint
        self.head_in_checkpoint = head_in_checkpoint
        self.shared = shared
        self.used_every = used_every
        self.embedding = nn.Embedding(19, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 19)
        self.head.weight = self.embedding.weight
        draw(self, 5)
        for layer in frozen:
            self.layers[layer].requires_grad_(False)

    @override
    def freezable(self) -> Sequence[Any]:
        return list(self.layers)

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


TIED_NETS: dict[str, dict[str, Any]] = {
    "tied weights": {},
    "reentrant checkpointing": {"checkpoint": "reentrant"},
    "tied weights, once in a checkpoint": {"checkpoint": "non-reentrant", "head_in_checkpoint": True},
    "a layer used twice": {"checkpoint": "non-reentrant", "shared": True},
    "frozen layers, checkpointing": {"checkpoint": "non-reentrant", "frozen": (1,)},
    "a layer used now and then": {"used_every": 3},
    "a layer never used": {"used_every": 0},
}
"""Options of `TiedNet`."""


class OddNet(TestModule):
    """Weights as libraries have them: transposed, in channels_last, sliced, without dimensions, without elements, shared, frozen."""

    lr = 3e-3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.transposed = nn.Linear(4, 5)
        self.same = self.transposed
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.vector = nn.Parameter(torch.ones(10)[::2])
        self.frozen = nn.Parameter(torch.ones(5, 7).t(), requires_grad=False)
        self.nothing = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ((0,), (0, 5)))
        draw(self, 8)
        self.convolution.to(memory_format=torch.channels_last)
        self.transposed.weight.data = self.transposed.weight.data.t().contiguous().t()

    @override
    def setup(self, stage: str) -> None:
        """All ranks train the weights of the first one."""
        if self.global_rank > 0:
            with torch.no_grad():
                for p in self.parameters():
                    p.add_(1)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        x = torch.randn(2, 3, 4, 4, generator=generator(10, step, micro, rank)).to(self.scale.dtype)
        x = self.same(self.convolution(x).mean((2, 3))) * self.scale.exp() + self.vector
        return (torch.tanh(x) @ self.frozen.t()).float().square().mean() + sum(p.float().sum() for p in self.nothing)


class Experts(nn.Module):
    """Experts that are modules, of which each token runs one; the last one gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (rows := (chosen == i).nonzero()[:, 0]).numel():
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return result


class SparseNet(TestModule):
    """Two layers of experts, of which ranks choose different ones; leaf modules of ZeRO stage 3.

    Args:
        layer_before: whether a layer is trained before the first experts.
    """

    def __init__(self, *, layer_before: bool = True, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first = nn.Linear(8, 8) if layer_before else nn.Identity()
            self.layers = nn.ModuleList(Experts() for _ in range(2))
        set_z3_leaf_modules(self, [Experts])

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        x = torch.randn(2, 8, generator=generator(14, step, micro, rank)).to(self.device)
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class _Calls(nn.Module):
    """A module with some parts, whose forward pass is a function of it and its inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    @override
    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(self, *inputs)


class OutsideNet(TestModule):
    """Parameters that others use than the module that has them: a child's in its sibling and in the root, and one that is an output."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.root = nn.Parameter(torch.randn(8, 8))
            self.child = nn.Linear(8, 8)
            self.returns = _Calls(lambda m: m.scale, scale=nn.Parameter(torch.ones(8, 8)))
            outside = lambda m, x: torch.tanh(functional.linear(m.own(x), self.child.weight))  # noqa: E731
            self.uses = _Calls(outside, own=nn.Linear(8, 8))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        x = torch.randn(4, 8, generator=generator(15, step, micro, rank)).to(self.device)
        x = self.uses(x @ self.root)
        x = functional.linear(x, self.child.weight, self.child.bias)
        return (x @ self.returns()).square().mean()
