"""`OffloadAdamW` in plain loops beside `torch.optim.AdamW`; on the CPU too."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plain_loops import Loop, Who, make_loop


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(device: str) -> Callable[..., Loop]:
    """Makes trainings."""
    return partial(make_loop, device=device)


def assert_near(ours: Loop, theirs: Loop, *, rtol: float = 3e-6) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=rtol, atol=0)


def seldom(step: int) -> float:
    return 50.0 if step % 4 else 1.0


def scaled(loop: Loop) -> None:
    """Half precision by autocast: unscaled, clipped, and without a step whose gradients are infinite. The scale is the last loss."""
    device = next(loop.model.parameters()).device.type
    loop.autocast = torch.float16 if device == "cuda" else torch.bfloat16
    loop.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
    loop.train(7, max_norm=lambda _: 1.0, infinite_in=(3,))
    loop.losses.append(torch.tensor(loop.scaler.get_scale(), dtype=torch.float32))


def divided(loop: Loop) -> None:
    """Gradient by gradient, by a tensor."""
    divisor = torch.full_like(loop.trained[0][0, 0], 4.0, dtype=torch.bfloat16)
    for step in range(3):
        loop.backward(step)
        for p in loop.trained:
            assert p.grad is not None
            p.grad.div_(divisor)
        loop.end_step()


@pytest.mark.parametrize(
    ("keys", "train", "rtol"),
    [
        ({"accumulation_steps": 1}, Loop.train, 3e-6),
        ({"accumulation_steps": 1}, partial(Loop.train, max_norm=seldom), 3e-6),
        ({}, partial(Loop.train, max_norm=lambda _: 0.5), 3e-6),
        ({"accumulate_on": "device"}, partial(Loop.train, micro_batches=lambda _: 3, max_norm=seldom), 3e-6),
        ({"accumulate_on": "host"}, partial(Loop.train, micro_batches=lambda _: 3), 3e-6),
        # Beside float32 masters: weights are the same bits but for a rounding now and then.
        ({"dtype": torch.bfloat16}, partial(Loop.train, steps=4, max_norm=lambda _: 0.5), 1e-3),
        # The same losses until a half's rounding differs.
        ({}, scaled, 1e-3),
        ({"accumulation_steps": 1}, divided, 3e-6),
    ],
    ids=["plain", "seldom clipped", "always clipped", "on the device", "on the host", "bfloat16", "scaled", "divided"],
)
def test_losses(make: Callable[..., Loop], keys: dict[str, Any], train: Callable[[Loop], object], rtol: float) -> None:
    loops = [make(who, **keys) for who in ("ours", "torch")]
    for loop in loops:
        train(loop)
    assert_near(*loops, rtol=rtol)


@pytest.mark.parametrize(("first", "second"), [("ours", "torch"), ("torch", "ours")])
def test_state_of_the_other(make: Callable[..., Loop], first: Who, second: Who) -> None:
    loop = make(first, scheduled=False).train(4)
    model, optimizer = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    other = make(second, scheduled=False)
    other.model.load_state_dict(model)
    other.optimizer.load_state_dict(optimizer)
    other.steps = 4
    other.train(4)
    torch.testing.assert_close(other.losses, loop.train(4).losses[4:], rtol=3e-6, atol=0)


def test_on_another_stream(make: Callable[..., Loop], device: str) -> None:
    """The last layer's forward pass, hence its backward pass and hooks."""
    if device == "cpu":
        pytest.skip("has no streams")
    ours, theirs = make("ours", accumulation_steps=1), make("torch")
    main, second = torch.cuda.current_stream(), torch.cuda.Stream()
    layer = ours.model[-2]  # type: ignore[index]  # a Sequential
    forward = layer.forward

    def elsewhere(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        second.wait_stream(main)
        with torch.cuda.stream(second):
            torch.cuda._sleep(1_000_000)
            out: Tensor = forward(hidden, *args, **kwargs)
        main.wait_stream(second)
        out.record_stream(main)
        return out

    layer.forward = elsewhere
    assert_near(ours.train(8, max_norm=seldom), theirs.train(8, max_norm=seldom))


def test_memory_does_not_grow(make: Callable[..., Loop], device: str) -> None:
    """Neither what is allocated between steps, nor what the allocator has taken for the peak."""
    loop = make("ours")
    seen: list[tuple[int, int]] = []
    for _ in range(5):
        loop.train(10, max_norm=seldom)
        loop.losses.clear()
        if device == "cuda":
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len({*seen[1:]}) <= 1, seen
