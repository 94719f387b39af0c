"""Errors of AdamW's update by codes of 8 bits for both moments, on the moments of real trainings, and weights that run away by them.

    python -m benchmarks.moments

Three models of `benchmarks.convergence` are trained by torch's AdamW. After some steps both moments are coded, tile by tile, with the
largest magnitude of a tile as scale, and the update m / (sqrt(v) + eps) of the decoded ones is compared with the exact one. Second moments
are rounded stochastically, and to a positive number if they are not zero. Of `ratio`, the code is that of m / sqrt(v), and m is decoded
beside the decoded v; of `root`, sqrt(v) is rounded without bias, and not v. `root` and `ratio` are those of `moments_dtype="int8"`.

The last columns are the largest change of a weight, in units of the learning rate, whose gradients end after 100 steps, come in one of 100
steps, or shrink by 1 % a step, in 1,000 steps with betas of 0.9 and 0.95, where every other weight of its tile has normally distributed
gradients of unit variance.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.command_line import CommandLine
from benchmarks.common.provenance import about, with_origin
from benchmarks.common.results import markdown
from benchmarks.convergence.corpus import python_library
from benchmarks.convergence.gpt import TextData, untrained
from benchmarks.convergence.optimizers import adamw
from benchmarks.convergence.run import SMALL
from benchmarks.convergence.threshold_tasks import IGNORED, TASKS

STEPS = (20, 200, 1000)
"""After which moments are coded."""
BETAS, EPS = (0.9, 0.999), 1e-8
KINDS = ("dead", "rare", "shrinking")
COLUMNS = ("elements a scale", "error, mean", "at most", "of one element")


def dynamic_tree(n_digits: int) -> Tensor:
    """Dynamic tree quantisation (Dettmers, arXiv 2110.02861) of [0, 1]: leading zeros are a decimal exponent, what follows a fraction.

    Args:
        n_digits: bits behind the sign.
    """
    values = [0.0, 1.0]
    for exponent in range(n_digits):
        edges = torch.linspace(0.1, 1, 2 ** (n_digits - 1 - exponent) + 1)
        values += (10.0**-exponent * (edges[1:] + edges[:-1]) / 2).tolist()
    return torch.tensor(sorted(values))


def power(exponent: int, n: int) -> Tensor:
    """(c / (n - 1)) ** exponent of n codes."""
    return (torch.arange(n) / (n - 1)) ** exponent


def both_signs(magnitudes: Tensor) -> Tensor:
    """The code of a signed number."""
    return torch.cat([-magnitudes[1:].flip(0), magnitudes])


SECOND = {
    "linear": power(1, 256),
    "square": power(2, 256),
    "fourth power": power(4, 256),
    "tree": dynamic_tree(8),
    "root": power(2, 256),
}
"""Codes of v; `root`: of sqrt(v)."""
FIRST = {
    "linear": both_signs(power(1, 128)),
    "square": both_signs(power(2, 128)),
    "fourth power": both_signs(power(4, 128)),
    "tree": both_signs(dynamic_tree(7)),
    "ratio": both_signs(power(2, 128)),
}
"""Codes of m; `ratio`: of m / sqrt(v)."""

Rounding = Literal["to nearest", "toward zero", "stochastically"]


class Rule(NamedTuple):
    """A code of both moments: names in `SECOND` and `FIRST`, and how first moments are rounded."""

    second: str
    first: str
    rounding: Rounding = "to nearest"
    tile: int = 128
    """Elements that share a scale."""


RULES = (
    *(Rule(second, first) for second in list(SECOND)[:-1] for first in ("linear", "square", "tree")),
    Rule("fourth power", "square", tile=64),
    Rule("fourth power", "square", "toward zero"),
    Rule("fourth power", "square", "stochastically"),
    Rule("fourth power", "fourth power", "stochastically"),
    Rule("root", "fourth power", "stochastically"),
    Rule("fourth power", "ratio", "stochastically"),
    Rule("root", "ratio", "to nearest"),
    Rule("root", "ratio", "stochastically"),
)


def coded(values: Tensor, code: Tensor, tile: int, noise: Callable[[Tensor], Tensor]) -> Tensor:
    """Values after coding. `noise` gives, for each value, how near to the upper neighbour it has to be to become that, from 0 to 1."""
    rows = F.pad(values, (0, -len(values) % tile)).view(-1, tile)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
    shares = rows / scale
    upper = torch.bucketize(shares, code).clamp(1, len(code) - 1)
    low, high = code[upper - 1], code[upper]
    rounded = torch.where((shares - low) / (high - low) > noise(shares), high, low)
    rounded = torch.where((rounded == 0) & (code[0] == 0) & (shares > 0), code[1], rounded)
    return (rounded * scale).view(-1)[: len(values)]


def coded_moments(m: Tensor, v: Tensor, rule: Rule, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Both moments, flat, after coding by a rule."""

    def stochastic(shares: Tensor) -> Tensor:
        return torch.rand(shares.shape, generator=generator)

    def first(shares: Tensor) -> Tensor:
        if rule.rounding == "stochastically":
            return stochastic(shares)
        # Of what is below zero the upper neighbour is nearer to it.
        return torch.full_like(shares, 0.5) if rule.rounding == "to nearest" else (shares > 0).float()

    if rule.second == "root":
        root = coded(v.sqrt(), SECOND["root"], rule.tile, stochastic)
        v_coded = root.square()
    else:
        v_coded = coded(v, SECOND[rule.second], rule.tile, stochastic)
        root = v_coded.sqrt()
    if rule.first != "ratio":
        return coded(m, FIRST[rule.first], rule.tile, first), v_coded
    return coded((m / v.sqrt()).nan_to_num(0, 0, 0), FIRST["ratio"], rule.tile, first) * root, v_coded


def batches(task: str, seed: int) -> tuple[torch.nn.Module, Iterator[Callable[[], Tensor]]]:
    """A model and the losses of its training."""
    if task == "delay_small":
        gpt = untrained(SMALL, seed)
        text = TextData(python_library(), SMALL, steps=STEPS[-1], seed=seed).train_dataloader()
        return gpt, (lambda batch=batch: gpt.loss(batch) for batch in text)
    of_task = TASKS[task]()
    torch.manual_seed(seed)
    network = of_task.network()

    def loss(step: int) -> Tensor:
        inputs, targets = of_task.train(of_task.batch, torch.Generator().manual_seed(step))
        return F.cross_entropy(network.logits(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    return network, (lambda step=step: loss(step) for step in range(STEPS[-1]))


def moments_of(task: str) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
    """After each of `STEPS`, its number and both moments of each parameter, flat."""
    model, losses = batches(task, 1)
    optimizer = adamw(model, 2e-3, 0.01)
    for step, loss in enumerate(losses, start=1):
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()
        if step in STEPS:
            yield step, [(s["exp_avg"].flatten(), s["exp_avg_sq"].flatten()) for s in optimizer.state.values()]


def errors(step: int, moments: Sequence[tuple[Tensor, Tensor]], rule: Rule) -> tuple[float, float]:
    """Error of the update by root mean square, and its largest one, in units of the update's own root mean square."""
    generator = torch.Generator().manual_seed(2)

    def update(m: Tensor, v: Tensor) -> Tensor:
        return m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)

    exact = torch.cat([update(m, v) for m, v in moments])
    ours = torch.cat([update(*coded_moments(m, v, rule, generator)) for m, v in moments])
    unit, error = exact.square().mean().sqrt(), (ours - exact).abs()
    return float(error.square().mean().sqrt() / unit), float(error.max() / unit)


def of_sparse(kind: str, gradients: Tensor, step: int, generator: torch.Generator) -> None:
    """Leaves out or shrinks the gradients of every other weight."""
    if kind == "rare":
        gradients[1::2] *= torch.rand(len(gradients) // 2, generator=generator) < 0.01
    elif kind == "shrinking":
        gradients[1::2] *= 0.99**step
    elif step > 100:
        gradients[1::2] = 0


def largest_change(kind: str, rule: Rule | None) -> float:
    """Of a weight with such gradients, over the learning rate; None: moments in 32 bits."""
    beta1, beta2 = 0.9, 0.95
    generator, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    weights, m, v, largest = torch.zeros(4, 16 * 128)
    for step in range(1, 1001):
        gradients = torch.randn(len(weights), generator=generator)
        of_sparse(kind, gradients, step, generator)
        m, v = beta1 * m + (1 - beta1) * gradients, beta2 * v + (1 - beta2) * gradients.square()
        weights = weights - m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)
        largest = torch.maximum(largest, weights.abs())
        if rule is not None:
            m, v = coded_moments(m, v, rule, noise)
    return float(largest[1::2].max())


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.moments", __doc__)
    parser.add_results(report_only=False)
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    found = [(step, moments) for task in ("delay_small", "recall", "modular") for step, moments in moments_of(task)]
    of_float32 = {kind: f"{largest_change(kind, None):.0f}" for kind in KINDS}
    rows = [{"second moment": "float32", "first moment": "float32", **dict.fromkeys(COLUMNS, ""), **of_float32}]
    for rule in RULES:
        typical, largest = zip(*(errors(step, moments, rule) for step, moments in found), strict=True)
        row = {"second moment": rule.second, "first moment": f"{rule.first}, {rule.rounding}"}
        numbers = (f"{rule.tile}", f"{100 * sum(typical) / len(typical):.1f} %", f"{100 * max(typical):.1f} %")
        row |= dict(zip(COLUMNS, (*numbers, f"{max(largest):.1f}"), strict=True))
        rows.append({**row, **{kind: f"{largest_change(kind, rule):.0f}" for kind in KINDS}})
    text = with_origin(markdown(rows), about("python -m benchmarks.moments"))
    (options.results / "moments.md").write_text(f"{text}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
