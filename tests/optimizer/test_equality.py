"""Plain loops with `OffloadAdamW` have the losses of `torch.optim.AdamW`, with torch's own clipping, scaling and accumulation."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lightning_zenflow import OffloadAdamW
from plain_loops import Loop, Who, close, groups_of, loss_of, make_loop, make_model, make_optimizer, reading_of


@pytest.fixture
def both() -> Iterator[Callable[..., tuple[Loop, Loop]]]:
    """Makes a training of each side; those of ours are closed at the end."""
    made: list[Loop] = []

    def make(**keys: Any) -> tuple[Loop, Loop]:
        made.append(make_loop("ours", **keys))
        return made[-1], make_loop("torch", **keys)

    yield make
    close(*made)


def assert_same(ours: Loop, theirs: Loop) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=3e-6, atol=0)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=3e-6, atol=0)
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=0, atol=1e-4)


def seldom(step: int) -> float:
    return 50.0 if step % 4 else 1.0


@pytest.mark.parametrize(
    ("keys", "options", "in_backward"),
    [
        ({}, {}, 7),
        ({"accumulation_steps": 1}, {}, 8),
        ({}, {"max_norm": lambda _: 50.0}, 7),
        ({"accumulation_steps": 1}, {"max_norm": seldom}, 7),
        ({}, {"max_norm": lambda _: 0.5}, 0),
        ({}, {"micro_batches": lambda _: 3, "max_norm": lambda _: 50.0}, 7),
        ({}, {"micro_batches": lambda step: 1 if step == 5 else 3}, 6),
        ({"accumulate_on": "host"}, {"micro_batches": lambda _: 3}, 7),
        ({"betas": (0.8, 0.9), "weight_decay": 0.3}, {}, 7),
        ({"offload_ratio": 0.5}, {"max_norm": seldom}, 6),
        ({"offload_ratio": 0.0}, {"micro_batches": lambda _: 3, "max_norm": lambda _: 0.5}, 0),
    ],
    ids=[
        "plain",
        "known",
        "unclipped",
        "seldom",
        "always",
        "micro-batches",
        "fewer",
        "on the host",
        "betas",
        "half",
        "none",
    ],
)
def test_losses(both: Any, keys: dict[str, Any], options: dict[str, Any], in_backward: int) -> None:
    """Of eight steps, and how many of them were submitted in backward."""
    ours, theirs = both(**keys)
    assert_same(ours.train(**options), theirs.train(**options))
    assert reading_of(ours.optimizer).steps_in_backward == in_backward


def test_closures(both: Any) -> None:
    """As Lightning's automatic optimization has them: the last backward pass inside of the closure, the others before it."""

    def train(loop: Loop) -> None:
        for step in range(6):
            loop.optimizer.zero_grad()
            (loss_of(loop.model, 2 * step) / 2).backward()

            def closure(step: int = step) -> float:
                loss = loss_of(loop.model, 2 * step + 1) / 2
                loss.backward()
                clip_grad_norm_(loop.model.parameters(), 50.0)
                return float(loss.detach())

            loop.losses.append(loop.optimizer.step(closure))

    ours, theirs = both()
    train(ours)
    train(theirs)
    assert_same(ours, theirs)
    assert reading_of(ours.optimizer).steps_in_backward == 6


def test_said_accumulation(both: Any) -> None:
    def train(loop: Loop) -> None:
        for step in range(4):
            for micro in range(3):
                last = micro == 2
                if isinstance(loop.optimizer, OffloadAdamW) and not last:
                    with loop.optimizer.accumulate():
                        loss_of(loop.model, 10 * step + micro).backward()
                else:
                    loss_of(loop.model, 10 * step + micro).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    ours, theirs = both(accumulation_steps=1)
    train(ours)
    loop = theirs
    train(loop)
    assert_same(ours, theirs)
    assert reading_of(ours.optimizer).steps_in_backward == 4


def test_loss_scaler(both: Any) -> None:
    """torch's scaler: unscales, clips, and leaves out a step with an infinite gradient."""

    def train(loop: Loop) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(7):
            loss = loss_of(loop.model, step)
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            scaler.unscale_(loop.optimizer)
            loop.norms.append(float(clip_grad_norm_(loop.model.parameters(), 1.0)) if step != 3 else 0.0)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
            loop.losses.append(float(loss.detach()))
        return float(scaler.get_scale())

    ours, theirs = both()
    assert train(ours) == train(theirs)
    assert_same(ours, theirs)


def test_frozen_for_some_steps(both: Any) -> None:
    """A frozen parameter, its moments and its count of steps stand still."""

    def freeze(loop: Loop) -> None:
        loop.model[0].weight.requires_grad_(loop.steps not in (3, 4))

    ours, theirs = both()
    assert_same(ours.train(begin=freeze), theirs.train(begin=freeze))


def test_written_weights(both: Any) -> None:
    """What the user writes between two steps is trained on."""

    def clamp(loop: Loop) -> None:
        if loop.steps in (2, 3, 6):
            with torch.no_grad():
                loop.model[-1].weight.clamp_(-0.05, 0.05)

    ours, theirs = both()
    assert_same(ours.train(begin=clamp), theirs.train(begin=clamp))


def test_loaded_weights(both: Any) -> None:
    """`load_state_dict` of the model in the middle of a training."""
    start = {name: value.clone() for name, value in make_model().state_dict().items()}

    def back(loop: Loop) -> None:
        if loop.steps == 4:
            loop.model.load_state_dict(start)

    ours, theirs = both()
    assert_same(ours.train(begin=back), theirs.train(begin=back))


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


def test_tied_weights_and_checkpoints(both: Any) -> None:
    loops = []
    for who in ("ours", "torch"):
        model = Tied(make_model())
        loops.append(make_loop(who, model=model))
    for loop in loops:
        loop.train(max_norm=lambda _: 50.0)
    assert_same(*loops)
    close(*loops)


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
        if isinstance(of_generator, OffloadAdamW) and isinstance(of_judge, OffloadAdamW):
            of_generator.close()
            of_judge.close()
        return losses

    torch.testing.assert_close(train("ours"), train("torch"), rtol=3e-6, atol=1e-7)


def test_bfloat16() -> None:
    """Beside float32 master weights that are updated by hand, with clipping: the first steps have the same bits."""
    ours = make_loop("ours", dtype=torch.bfloat16)
    model = make_model(torch.bfloat16)
    trained = [p for group in groups_of(model) for p in group["params"]]
    masters = [p.detach().float().requires_grad_() for p in trained]
    of_groups = iter(masters)
    by_hand = [{**group, "params": [next(of_groups) for _ in group["params"]]} for group in groups_of(model)]
    theirs = Loop(model, torch.optim.AdamW(by_hand, lr=1e-2), None)
    ours.scheduler = torch.optim.lr_scheduler.LambdaLR(ours.optimizer, lambda _: 1.0)
    for step in range(3):
        loss = loss_of(model, 100 * step)
        loss.backward()
        theirs.losses.append(float(loss.detach()))
        for master, p in zip(masters, trained, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        clip_grad_norm_(masters, 0.5)
        theirs.optimizer.step()
        for master, p in zip(masters, trained, strict=True):
            p.data.copy_(master.detach())
    ours.train(3, max_norm=lambda _: 0.5)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=0)
    assert ours.losses[:2] == theirs.losses[:2]
    close(ours)
