"""Modules drawn by hypothesis: shapes, memory layouts, types, sharing, freezing, layers. Data is a function of step and micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from models import TestModule, generator


class Inputs:
    """Random inputs of one micro-batch, in the type of the model.

    Args:
        key: what the numbers depend on.
        dtype: the model's.
    """

    def __init__(self, *key: int, dtype: torch.dtype) -> None:
        self._generator = generator(11, *key)
        self._dtype = dtype

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def tokens(self, n: int, *shape: int) -> Tensor:
        return torch.randint(n, shape, generator=self._generator)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "sliced": lambda t: torch.cat([t, t], -1)[..., ::2].copy_(t) if t.dim() else t,
    "in the middle of a buffer": lambda t: t.new_zeros(t.numel() + 3)[3:].view(t.shape).copy_(t),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a module. Every part adds to the loss of the micro-batches that use it."""

    kind: str
    """Key of `LAYERS`, or "raw" for a single parameter."""
    sizes: tuple[int, int] = (3, 7)
    """Of the layer."""
    shape: tuple[int, ...] = (7,)
    """Of the parameter, where `kind` is "raw"."""
    layout: str = "contiguous"
    """Key of `LAYOUTS`, for all of its parameters that it applies to."""
    frozen: str = "none"
    """Which of its parameters do not require gradients: "none", "all", "vectors" or the "first"."""
    used: str = "always"
    optimized: bool = True
    """Whether the optimizer has its parameters."""
    dtype: torch.dtype = torch.float32
    """In which it is made; `precision` decides about training."""
    recomputed: bool = False
    """Whether its activations are computed again in backward; not those of a spectral norm, which changes its buffers."""

    def times_used(self, step: int, micro: int) -> int:
        """By the loss of a micro-batch."""
        every = {"always": 1, "twice": 2, "never": 0, "even steps": 1 - step % 2, "first micro-batch": int(micro == 0)}
        return every[self.used]


class Tied(nn.Module):
    """An embedding whose matrix is the head's as well."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(a, b)
        self.head = nn.Linear(b, a)
        self.head.weight = self.embedding.weight


class Buffered(nn.Module):
    """Buffers of many types beside a parameter; one of them counts."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a, b))
        self.register_buffer("mask", torch.arange(b) % 2 == 0)
        self.register_buffer("wide", torch.ones(b, dtype=torch.float64), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def masked(m: Any, x: Inputs, a: int, b: int) -> Tensor:
    m.count += 1
    return torch.tanh(m.weight * m.mask + m.wide.to(m.weight.dtype)) * x.numbers(*m.weight.shape)


LAYERS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[Any, Inputs, int, int], Tensor]]] = {
    "linear": (nn.Linear, lambda m, x, a, b: m(x.numbers(3, a))),
    "wide linear": (lambda a, b: nn.Linear(1031, b), lambda m, x, a, b: m(x.numbers(2, 1031))),
    "embedding": (lambda a, b: nn.Embedding(a, b, padding_idx=0), lambda m, x, a, b: m(x.tokens(a, 4))),
    "embedding bag": (nn.EmbeddingBag, lambda m, x, a, b: m(x.tokens(a, 2, 3))),
    "tied": (Tied, lambda m, x, a, b: m.head(torch.tanh(m.embedding(x.tokens(a, 4))))),
    # Each input goes to one of three; some get none.
    "experts": (
        lambda a, b: nn.ModuleList(nn.Linear(a, b) for _ in range(3)),
        lambda m, x, a, b: m[int(x.tokens(3, 1))](x.numbers(2, a)),
    ),
    "conv1d": (lambda a, b: nn.Conv1d(a, b, 3), lambda m, x, a, b: m(x.numbers(2, a, 6))),
    "conv2d": (lambda a, b: nn.Conv2d(a, b, (2, 3)), lambda m, x, a, b: m(x.numbers(2, a, 4, 5))),
    "conv2d in groups": (lambda a, b: nn.Conv2d(a, a, 3, groups=a), lambda m, x, a, b: m(x.numbers(2, a, 4, 5))),
    "conv3d": (lambda a, b: nn.Conv3d(a, b, 2), lambda m, x, a, b: m(x.numbers(1, a, 3, 3, 3))),
    "transposed convolution": (lambda a, b: nn.ConvTranspose2d(a, b, 2), lambda m, x, a, b: m(x.numbers(1, a, 3, 3))),
    "batch norm": (lambda a, b: nn.BatchNorm1d(b), lambda m, x, a, b: m(x.numbers(4, b))),
    "layer norm": (lambda a, b: nn.LayerNorm((a, b)), lambda m, x, a, b: m(x.numbers(2, a, b))),
    "LSTM": (lambda a, b: nn.LSTM(a, b, num_layers=2), lambda m, x, a, b: m(x.numbers(3, 2, a))[0]),
    "GRU": (lambda a, b: nn.GRU(a, b, bidirectional=True), lambda m, x, a, b: m(x.numbers(3, 2, a))[0]),
    "attention": (
        lambda a, b: nn.TransformerEncoderLayer(2 * a, 2, b, dropout=0.0),
        lambda m, x, a, b: m(x.numbers(3, 2, 2 * a)),
    ),
    "bilinear": (lambda a, b: nn.Bilinear(a, b, 2), lambda m, x, a, b: m(x.numbers(3, a), x.numbers(3, b))),
    "weight norm": (lambda a, b: weight_norm(nn.Linear(a, b)), lambda m, x, a, b: m(x.numbers(3, a))),
    "spectral norm": (lambda a, b: spectral_norm(nn.Linear(a, b)), lambda m, x, a, b: m(x.numbers(3, a))),
    "orthogonal": (lambda a, b: orthogonal(nn.Linear(a, b)), lambda m, x, a, b: m(x.numbers(3, a))),
    "buffers": (Buffered, masked),
    "no parameters": (lambda a, b: nn.GELU(), lambda m, x, a, b: m(x.numbers(3, a))),
    "parameter dict": (
        lambda a, b: nn.ParameterDict({"a": nn.Parameter(torch.randn(a)), "b": nn.Parameter(torch.randn(b, a))}),
        lambda m, x, a, b: torch.tanh(m["b"] * m["a"]) * x.numbers(b, a),
    ),
}
"""How a layer of two sizes is made, and its output: (module, inputs, sizes) -> tensor."""
FLOAT32_ONLY = {"orthogonal"}
"""Layers that torch has no bfloat16 operations for."""
OF_MODULES = {"attention", "orthogonal", "spectral norm", "weight norm"}
"""Layers of several modules, between which torch converts nothing: what is frozen keeps its type, in "32-true", beside trained float32."""


def raw(m: Any, x: Inputs, a: int, b: int) -> Tensor:
    return torch.tanh(m[0]) * x.numbers(*m[0].shape)


def made(part: Part) -> nn.Module:
    """A part's module with its layouts and types."""
    if part.kind == "raw":
        module: nn.Module = nn.ParameterList([nn.Parameter(torch.randn(part.shape))])
    else:
        module = LAYERS[part.kind][0](*part.sizes)
    has_two_types = part.kind in OF_MODULES and part.frozen in ("vectors", "first")
    module = module.to(torch.float32 if has_two_types or part.kind in FLOAT32_ONLY else part.dtype)
    for i, p in enumerate(module.parameters()):
        p.data = LAYOUTS[part.layout](p.data)
        frozen = {"none": False, "all": True, "vectors": p.dim() < 2, "first": i == 0}[part.frozen]
        p.requires_grad_(p.requires_grad and not frozen)
    return module


class RandomNet(TestModule):
    """Of parts, and of a linear layer that is there always, so that every step has a gradient.

    Args:
        parts: what adds to the loss.
        seed: of the weights.
    """

    def __init__(self, *, parts: Sequence[Part], seed: int, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(seed)
        self.base = nn.Linear(5, 4)
        self.options = tuple(parts)
        self.parts = nn.ModuleList(map(made, parts))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        dtype = self.base.weight.dtype
        total = torch.tanh(self.base(Inputs(step, micro, dtype=dtype).numbers(3, 5))).float().square().mean()
        for i, (part, module) in enumerate(zip(self.options, self.parts, strict=True)):
            output = raw if part.kind == "raw" else LAYERS[part.kind][1]
            # What is frozen as a whole keeps its type.
            of_part = next((p.dtype for p in module.parameters()), dtype)
            for time in range(part.times_used(step, micro)):
                inputs = module, Inputs(step, micro, i, time, dtype=of_part), *part.sizes
                again = part.recomputed and part.kind != "spectral norm"
                y = checkpoint(output, *inputs, use_reentrant=False) if again else output(*inputs)
                total = total + torch.sin(2 * y.float()).sum() / (1 + y.numel())
        return total

    @override
    def optimized(self) -> list[list[nn.Parameter]]:
        """In turn, the two of `base` first, so that every group trains something."""
        parts = zip(self.options, self.parts, strict=True)
        left_out = {p for part, module in parts if not part.optimized for p in module.parameters()}
        n = len(self.optimizer_options.initial())
        return [[p for p in self.parameters() if p not in left_out][i::n] for i in range(n)]


SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 13])
PARTS = st.builds(
    Part,
    kind=st.just("raw") | st.sampled_from(sorted(LAYERS)),
    sizes=st.tuples(SIZES, SIZES),
    shape=st.lists(st.sampled_from([1, 2, 3, 5, 7]), max_size=5).map(tuple)
    | st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=3).map(tuple)
    | st.sampled_from([(2, 1031), (1031, 2), (1, 2053), (2053,), (4099, 1)]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    frozen=st.sampled_from(["none", "none", "none", "all", "vectors", "first"]),
    used=st.sampled_from(["always", "always", "always", "even steps", "never", "twice", "first micro-batch"]),
    optimized=st.sampled_from([True, True, True, True, False]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    recomputed=st.sampled_from([False, False, False, True]),
)
