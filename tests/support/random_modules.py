"""Modules drawn by hypothesis: shapes, memory layouts, types, sharing, freezing, layers. Data is a function of step and micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from models import generator


class Inputs:
    """Random inputs of one micro-batch, made where the weights are, in the type of the model.

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


Output = Callable[[Any, Inputs], Tensor]
"""(module, inputs) -> its output."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "sliced": lambda t: torch.cat([t, t], -1)[..., ::2].copy_(t) if t.dim() else t,
    "in the middle of a buffer": lambda t: torch.zeros(t.numel() + 3)[3:].view(t.shape).copy_(t),
}

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 13])
SHAPES = (
    st.lists(st.sampled_from([1, 2, 3, 5, 7]), max_size=5).map(tuple)
    | st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=3).map(tuple)
    | st.sampled_from([(2, 1031), (1031, 2), (1, 2053), (2053,), (4099, 1)])
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a module. Every part adds to the loss of the steps that use it."""

    kind: str
    """Key of `LAYERS`, or "raw" for a single parameter."""
    sizes: tuple[int, int] = (3, 5)
    """Of the layer."""
    shape: tuple[int, ...] = (3,)
    """Of the parameter, where `kind` is "raw"."""
    layout: str = "contiguous"
    """Key of `LAYOUTS`, for all of its parameters that it applies to."""
    frozen: Literal["none", "all", "vectors", "first"] = "none"
    """Which of its parameters do not require gradients."""
    used: Literal["always", "even steps", "never", "twice", "first micro-batch"] = "always"
    """In which micro-batches the loss depends on it."""
    optimized: bool = True
    """Whether the optimizer has its parameters."""
    dtype: torch.dtype = torch.float32
    """In which it is made; `precision` decides about training."""
    recomputed: bool = False
    """Whether its activations are computed again in backward."""


def normed(norm: Callable[[nn.Module], nn.Module], a: int, b: int) -> nn.Module:
    return norm(nn.Linear(a, b))


def run(shape: Callable[[int, int], Sequence[int]]) -> Callable[[int, int], Output]:
    """Calls the module with numbers of a shape."""
    return lambda a, b: lambda m, x: m(x.numbers(*shape(a, b)))


class Tied(nn.Module):
    """An embedding whose matrix is the head's as well."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(a, b)
        self.head = nn.Linear(b, a)
        self.head.weight = self.embedding.weight


class Experts(nn.Module):
    """Each input goes to one of three experts; some get none."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert-{i}": nn.Linear(a, b) for i in range(3)})


def to_expert(m: Any, x: Inputs) -> Tensor:
    layers = list(m.experts.values())
    first = layers[0]
    chosen = layers[int(x.tokens(3, 1))]
    return chosen(x.numbers(2, first.in_features))


class Buffered(nn.Module):
    """Buffers of many types beside a parameter; one of them counts."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a, b))
        self.register_buffer("mask", torch.arange(b) % 2 == 0)
        self.register_buffer("wide", torch.ones(b, dtype=torch.float64), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def masked(m: Any, x: Inputs) -> Tensor:
    m.count += 1
    return torch.tanh(m.weight * m.mask + m.wide.to(m.weight.dtype)) * x.numbers(*m.weight.shape)


LAYERS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int], Output]]] = {
    "linear": (nn.Linear, run(lambda a, b: (3, a))),
    "linear without bias": (lambda a, b: nn.Linear(a, b, bias=False), run(lambda a, b: (3, a))),
    "wide linear": (lambda a, b: nn.Linear(1031, b), run(lambda a, b: (2, 1031))),
    "embedding": (nn.Embedding, lambda a, b: lambda m, x: m(x.tokens(a, 4))),
    "embedding with padding": (
        lambda a, b: nn.Embedding(a, b, padding_idx=0),
        lambda a, b: lambda m, x: m(x.tokens(a, 4)),
    ),
    "embedding bag": (nn.EmbeddingBag, lambda a, b: lambda m, x: m(x.tokens(a, 2, 3))),
    "tied": (Tied, lambda a, b: lambda m, x: m.head(torch.tanh(m.embedding(x.tokens(a, 4))))),
    "experts": (Experts, lambda a, b: to_expert),
    "conv1d": (lambda a, b: nn.Conv1d(a, b, 3), run(lambda a, b: (2, a, 6))),
    "conv2d": (lambda a, b: nn.Conv2d(a, b, (2, 3)), run(lambda a, b: (2, a, 4, 5))),
    "conv2d in groups": (lambda a, b: nn.Conv2d(a, a, 3, groups=a), run(lambda a, b: (2, a, 4, 5))),
    "conv3d": (lambda a, b: nn.Conv3d(a, b, 2), run(lambda a, b: (1, a, 3, 3, 3))),
    "transposed convolution": (lambda a, b: nn.ConvTranspose2d(a, b, 2), run(lambda a, b: (1, a, 3, 3))),
    "batch norm": (lambda a, b: nn.BatchNorm1d(b), run(lambda a, b: (4, b))),
    "layer norm": (lambda a, b: nn.LayerNorm((a, b)), run(lambda a, b: (2, a, b))),
    "group norm": (lambda a, b: nn.GroupNorm(1, b), run(lambda a, b: (2, b, 3))),
    "LSTM": (lambda a, b: nn.LSTM(a, b, num_layers=2), lambda a, b: lambda m, x: m(x.numbers(3, 2, a))[0]),
    "GRU in both directions": (
        lambda a, b: nn.GRU(a, b, bidirectional=True),
        lambda a, b: lambda m, x: m(x.numbers(3, 2, a))[0],
    ),
    "attention": (
        lambda a, b: nn.TransformerEncoderLayer(2 * a, 2, b, dropout=0.0),
        run(lambda a, b: (3, 2, 2 * a)),
    ),
    "bilinear": (lambda a, b: nn.Bilinear(a, b, 2), lambda a, b: lambda m, x: m(x.numbers(3, a), x.numbers(3, b))),
    "weight norm": (lambda a, b: normed(weight_norm, a, b), run(lambda a, b: (3, a))),
    "old weight norm": (lambda a, b: normed(nn.utils.weight_norm, a, b), run(lambda a, b: (3, a))),
    "spectral norm": (lambda a, b: normed(spectral_norm, a, b), run(lambda a, b: (3, a))),
    "orthogonal": (lambda a, b: normed(orthogonal, a, b), run(lambda a, b: (3, a))),
    "buffers": (Buffered, lambda a, b: masked),
    "no parameters": (lambda a, b: nn.GELU(), run(lambda a, b: (3, a))),
    "parameter dict": (
        lambda a, b: nn.ParameterDict({"a": nn.Parameter(torch.randn(a)), "b": nn.Parameter(torch.randn(b, a))}),
        lambda a, b: lambda m, x: torch.tanh(m["b"] * m["a"]) * x.numbers(b, a),
    ),
    "nested": (
        lambda a, b: nn.Sequential(nn.Sequential(nn.ModuleList([nn.Linear(a, b)])[0], nn.Tanh()), nn.Linear(b, a)),
        run(lambda a, b: (3, a)),
    ),
}  # fmt: skip
FLOAT32_ONLY = ("orthogonal",)
"""Layers that torch has no bfloat16 operations for."""
NO_WIDER_BUFFERS = ("batch norm", "spectral norm")
"""Layers that torch does not do on the CPU with weights in bfloat16 and buffers in float32, as with the precision "bf16-mixed"."""


class Raw(nn.Module):
    """One parameter."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tuple(shape)))


def made(part: Part) -> tuple[nn.Module, Output]:
    """A part's module with its layouts and types, and how it is called."""
    if part.kind == "raw":
        module: nn.Module = Raw(part.shape)

        def output(m: Any, x: Inputs) -> Tensor:
            return torch.tanh(m.weight) * x.numbers(*m.weight.shape)
    else:
        make, call = LAYERS[part.kind]
        module, output = make(*part.sizes), call(*part.sizes)
    module = module.to(part.dtype)
    for p in module.parameters():
        p.data = LAYOUTS[part.layout](p.data)
    parameters = list(module.parameters())
    frozen = {
        "none": [],
        "all": parameters,
        "vectors": [p for p in parameters if p.dim() < 2],
        "first": parameters[:1],
    }[part.frozen]
    for p in frozen:
        p.requires_grad_(False)
    return module, output


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """A module; the first linear layer is there always, so that every step has a gradient."""

    parts: tuple[Part, ...] = field(default_factory=tuple)
    seed: int = 0


class RandomNet(nn.Module):
    """The module of some options."""

    def __init__(self, options: ModuleOptions) -> None:
        super().__init__()
        torch.manual_seed(options.seed)
        self.options = options
        self.base = nn.Linear(5, 4)
        self.parts = nn.ModuleList()
        self.outputs: list[Output] = []
        for part in options.parts:
            module, output = made(part)
            self.parts.append(module)
            self.outputs.append(output)

    def loss(self, step: int, micro: int) -> Tensor:
        """Of one micro-batch."""
        dtype = self.base.weight.dtype
        total = torch.tanh(self.base(Inputs(step, micro, dtype=dtype).numbers(3, 5))).float().square().mean()
        for i, (part, module, output) in enumerate(zip(self.options.parts, self.parts, self.outputs, strict=True)):
            times = {
                "always": 1,
                "even steps": 1 - step % 2,
                "never": 0,
                "twice": 2,
                "first micro-batch": int(micro == 0),
            }[part.used]
            for time in range(times):
                x = Inputs(step, micro, i, time, dtype=dtype)
                y = checkpoint(output, module, x, use_reentrant=False) if part.recomputed else output(module, x)
                total = total + torch.sin(2 * y.float()).sum() / (1 + y.numel())
        return total

    def optimized(self) -> list[nn.Parameter]:
        """What the optimizer gets, frozen ones included; shared ones once."""
        left_out = {
            p
            for part, module in zip(self.options.parts, self.parts, strict=True)
            if not part.optimized
            for p in module.parameters()
        }
        return [p for p in self.parameters() if p not in left_out]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    kind = draw(st.just("raw") | st.sampled_from(sorted(LAYERS)))
    return Part(
        kind=kind,
        sizes=(draw(SIZES), draw(SIZES)),
        shape=draw(SHAPES) if kind == "raw" else (3,),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        frozen=draw(st.sampled_from(["none", "none", "none", "all", "vectors", "first"])),
        used=draw(st.sampled_from(["always", "always", "always", "even steps", "never", "twice", "first micro-batch"])),
        optimized=draw(st.sampled_from([True, True, True, True, False])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        recomputed=kind != "spectral norm" and draw(st.sampled_from([False, False, False, True])),
    )


def modules(max_size: int = 6) -> st.SearchStrategy[ModuleOptions]:
    return st.builds(ModuleOptions, parts=st.lists(parts(), max_size=max_size).map(tuple), seed=st.integers(0, 1000))
