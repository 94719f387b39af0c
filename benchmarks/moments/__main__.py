"""Errors of AdamW's update by codes of 8 bits for both moments, on the moments of real trainings.

    python -m benchmarks.moments

Three models of `benchmarks.convergence` are trained by torch's AdamW. After some steps both moments are coded, tile by tile, with the
largest magnitude of a tile as scale, and the update m / (sqrt(v) + eps) of the decoded ones is compared with the exact one. Second moments
are rounded stochastically, and to a positive number if they are not zero. `fourth power` and `square` are those of `moments_dtype="int8"`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

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


SECOND = {"linear": power(1, 256), "square": power(2, 256), "fourth power": power(4, 256), "tree": dynamic_tree(8)}
FIRST = {
    "linear": both_signs(power(1, 128)),
    "square": both_signs(power(2, 128)),
    "tree": both_signs(dynamic_tree(7)),
}


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


def errors(
    step: int, moments: Sequence[tuple[Tensor, Tensor]], first: str, second: str, tile: int
) -> tuple[float, float]:
    """Error of the update by root mean square, and its largest one, in units of the update's own root mean square."""
    generator = torch.Generator().manual_seed(2)

    def update(m: Tensor, v: Tensor) -> Tensor:
        return m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)

    exact = torch.cat([update(m, v) for m, v in moments])
    ours = torch.cat(
        [
            update(
                coded(m, FIRST[first], tile, lambda shares: torch.full_like(shares, 0.5)),
                coded(v, SECOND[second], tile, lambda shares: torch.rand(shares.shape, generator=generator)),
            )
            for m, v in moments
        ]
    )
    unit, error = exact.square().mean().sqrt(), (ours - exact).abs()
    return float(error.square().mean().sqrt() / unit), float(error.max() / unit)


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
    rows = []
    for second, first, tile in [*product(SECOND, FIRST, [128]), ("fourth power", "square", 64)]:
        of_all = [errors(step, moments, first, second, tile) for step, moments in found]
        typical, largest = zip(*of_all, strict=True)
        row = {"second moment": second, "first moment": first, "elements a scale": str(tile)}
        row |= {"error, mean": f"{100 * sum(typical) / len(typical):.1f} %", "at most": f"{100 * max(typical):.1f} %"}
        rows.append({**row, "of one element": f"{max(largest):.1f}"})
    text = with_origin(markdown(rows), about("python -m benchmarks.moments"))
    (options.results / "moments.md").write_text(f"{text}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
