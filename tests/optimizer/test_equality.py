"""Plain loops with `OffloadAdamW` have the losses of `torch.optim.AdamW`, with torch's own clipping and accumulation. On any device, with
loss scalers, in bfloat16 and continued: tests/gpu/test_gpu_offload_adamw.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from plain_loops import Loop, Who, make_loop, make_model, make_optimizer, reading_of


def both(**keys: Any) -> tuple[Loop, Loop]:
    """A training of each side."""
    return make_loop("ours", **keys), make_loop("torch", **keys)


def assert_same(ours: Loop, theirs: Loop) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=3e-6, atol=0)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=3e-6, atol=0)
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=0, atol=1e-4)


def seldom(step: int) -> float:
    return 50.0 if step % 4 else 1.0


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "plain": ({}, {}, 7),
    "known": ({"accumulation_steps": 1}, {}, 8),
    "unclipped": ({}, {"max_norm": lambda _: 50.0}, 7),
    "seldom": ({"accumulation_steps": 1}, {"max_norm": seldom}, 7),
    "always": ({}, {"max_norm": lambda _: 0.5}, 0),
    "micro-batches": ({}, {"micro_batches": lambda _: 3, "max_norm": lambda _: 50.0}, 7),
    "fewer": ({}, {"micro_batches": lambda step: 1 if step == 5 else 3}, 6),
    "on the host": ({"accumulate_on": "host"}, {"micro_batches": lambda _: 3}, 7),
    "betas": ({"betas": (0.8, 0.9), "weight_decay": 0.3}, {}, 7),
    "half": ({"offload_ratio": 0.5}, {"max_norm": seldom}, 6),
    "none": ({"offload_ratio": 0.0}, {"micro_batches": lambda _: 3, "max_norm": lambda _: 0.5}, 0),
}


@pytest.mark.parametrize(("keys", "options", "in_backward"), LOSSES.values(), ids=LOSSES)
def test_losses(keys: dict[str, Any], options: dict[str, Any], in_backward: int) -> None:
    """Of eight steps, and how many of them were submitted in backward."""
    ours, theirs = both(**keys)
    assert_same(ours.train(**options), theirs.train(**options))
    assert reading_of(ours.optimizer).steps_in_backward == in_backward


def test_closures() -> None:
    """As Lightning's automatic optimization has them: the last backward pass inside of the closure, the others before it."""
    ours, theirs = both()
    for loop in (ours, theirs):
        for step in range(6):
            loop.optimizer.zero_grad()
            before = 1 + step // 3  # passes; at last more than the first step has
            for number in range(before):
                loop.backward(3 * step + number, share=before + 1)

            def closure(loop: Loop = loop, number: int = 3 * step + 2, share: int = before + 1) -> Tensor:
                loop.backward(number, share=share)
                clip_grad_norm_(loop.model.parameters(), 50.0)
                return loop.losses[-1]

            assert loop.optimizer.step(closure) is loop.losses[-1]  # type: ignore[arg-type]  # torch expects a number
    assert_same(ours, theirs)
    assert reading_of(ours.optimizer).steps_in_backward == 6


def test_said_accumulation() -> None:
    ours, theirs = both(accumulation_steps=1)
    for number in range(12):
        theirs.backward(number)
        with nullcontext() if number % 3 == 2 else ours.optimizer.accumulate():
            ours.backward(number)
        if number % 3 == 2:
            ours.end_step()
            theirs.end_step()
    assert_same(ours, theirs)
    assert reading_of(ours.optimizer).steps_in_backward == 4


def freeze(loop: Loop) -> None:
    """For two steps; the parameter, its moments and its count of steps stand still."""
    loop.model[0].weight.requires_grad_(loop.steps not in (3, 4))  # type: ignore[index]  # a Sequential


@torch.no_grad()
def clamp(loop: Loop) -> None:
    """Writes weights in some steps."""
    if loop.steps in (2, 3, 6):
        loop.model[-1].weight.clamp_(-0.05, 0.05)  # type: ignore[index]  # a Sequential


def start_again(loop: Loop) -> None:
    """With the first weights, by `load_state_dict`."""
    if loop.steps == 4:
        loop.model.load_state_dict(make_model().state_dict())


@pytest.mark.parametrize("begin", [freeze, clamp, start_again])
def test_changes_between_steps(begin: Callable[[Loop], None]) -> None:
    ours, theirs = both()
    assert_same(ours.train(begin=begin), theirs.train(begin=begin))


class Tied(nn.Module):
    """Embedding and head are one parameter; the middle is computed again in backward."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model
        model[-1].weight = model[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.model[0](tokens)
        for layer in self.model[1:-1]:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.model[-1](hidden)


def test_tied_weights_and_checkpoints() -> None:
    loops = [make_loop(who, model=Tied(make_model())).train(max_norm=lambda _: 50.0) for who in ("ours", "torch")]
    assert_same(*loops)


def test_two_optimizers() -> None:
    """A generator whose loss goes through the discriminator, which has an optimizer of its own."""

    def train(who: Who) -> list[float]:
        torch.manual_seed(0)
        generator, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        of_generator, of_judge = (make_optimizer(who, m.parameters(), accumulation_steps=1) for m in (generator, judge))
        losses = []
        for step in range(5):
            noise, real = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
            fake = generator(noise)
            loss = judge(fake.detach()).square().mean() - judge(real).mean()
            loss.backward()
            of_judge.step()
            of_judge.zero_grad()
            other = judge(fake).mean()
            other.backward()
            of_generator.step()
            of_generator.zero_grad()
            of_judge.zero_grad()
            losses += [float(loss.detach()), float(other.detach())]
        return losses

    torch.testing.assert_close(train("ours"), train("torch"), rtol=3e-6, atol=1e-7)
