"""What stands in `parameter.grad` between a gradient's arrival and the step. Other uses of it: `USES` of tests/support/between_steps.py."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_zenflow import OffloadAdamW
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import Loop, close, groups_of, loss_of, make_loop, make_model


@pytest.fixture(params=[1, None], ids=["updated in backward", "not yet"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """A training behind its first backward pass."""
    made = make_loop("ours", accumulation_steps=request.param)
    loss_of(made.model, 1).backward()
    yield made
    close(made)


def ours(loop: Loop) -> list[Any]:
    return [p.grad for p in loop.model.parameters() if p.requires_grad]


READS: dict[str, Callable[[Tensor], Any]] = {
    "clone": torch.clone,
    "sum": lambda g: g.abs().sum(),
    "infinity norm": lambda g: g.norm(float("inf")),
    "item": lambda g: g.flatten()[0].item(),
    "index": lambda g: g[0],
    "product": lambda g: g * 2,
    "detached": lambda g: g.detach().data.square(),
    "deep copy": copy.deepcopy,
    "stack": lambda g: torch.stack([g, g]),
    "finite": torch.isfinite,
    "multiplied to another": lambda g: g.new_ones(g.shape).mul_(g),
    "views": lambda g: torch.cat([*g.t().flatten().split(3)]).numpy().tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads(loop: Loop, read: Callable[[Tensor], Any]) -> None:
    loss_of(model := make_model(), 1).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for mine, theirs in zip(ours(loop), gradients, strict=True):
        torch.testing.assert_close(read(mine), read(theirs), rtol=1e-6, atol=0)
    assert all(p.grad is None for p in loop.model.parameters() if not p.requires_grad)


def test_between_backward_passes() -> None:
    """Their sum so far; further ones come on top."""
    loop, model = make_loop("ours"), make_model()
    for number in range(3):
        for of in (loop.model, model):
            loss_of(of, number).backward()
        theirs = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close([g.clone() for g in ours(loop)], theirs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(nn.utils.get_total_norm(ours(loop)), nn.utils.get_total_norm(theirs))


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping(loop: Loop, foreach: bool | None, order: float) -> None:
    """By torch, of any order; reads show what is clipped."""
    model = make_model()
    loss_of(model, 1).backward()
    clip = lambda m: clip_grad_norm_(m.parameters(), 0.3, norm_type=order, foreach=foreach)  # noqa: E731
    torch.testing.assert_close(clip(loop.model), clip(model), rtol=1e-6, atol=0)
    for mine, theirs in zip(ours(loop), (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(mine.clone(), theirs, rtol=1e-6, atol=0)
    # Clipped again by a smaller norm.
    torch.testing.assert_close(clip_grad_norm_(loop.model.parameters(), 0.1), clip_grad_norm_(model.parameters(), 0.1))
    other = torch.optim.AdamW(groups_of(model), lr=1e-2)
    other.step()
    loop.optimizer.step()
    for mine, theirs in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def before_step(use: Callable[[Any], object]) -> Callable[[Loop], object]:
    """Uses the model, then takes the step."""
    return lambda loop: (use(loop.model), loop.optimizer.step())


def behind_step(use: Callable[[Any], object]) -> Callable[[Loop], object]:
    return lambda loop: (loop.optimizer.step(), use(loop.model))


REFUSED: dict[str, tuple[Callable[[Loop], object], str]] = {
    "clip by value": (before_step(lambda model: clip_grad_value_(model.parameters(), 0.1)), "would change it"),
    "copy": (before_step(lambda model: model[-1].weight.grad.copy_(torch.ones(50, 32))), "would change it"),
    "row": (before_step(lambda model: model[-1].weight.grad.__setitem__(0, 0.0)), "would change it"),
    "by mask": (
        before_step(lambda model: model[-1].weight.grad.__setitem__(torch.ones(50, 32) > 0, 0.0)),
        "would change it",
    ),
    "assigned": (
        before_step(lambda model: setattr(model[-1].weight, "grad", torch.ones_like(model[-1].weight))),
        "must not be assigned",
    ),
    "removed": (before_step(lambda model: setattr(model[-1].weight, "grad", None)), "must not be assigned"),
    "some clipped": (before_step(lambda model: clip_grad_norm_(model[0].parameters(), 1e-3)), "must be scaled alike"),
    "read behind the step": (behind_step(lambda model: model[-1].weight.grad.sum()), "must be used before"),
    "backward behind the step": (
        behind_step(lambda model: loss_of(model, 2).backward()),
        r"`optimizer.zero_grad\(\)` must come before",
    ),
    "two steps": (lambda loop: [loop.optimizer.step() for _ in range(2)], "a backward pass of its own"),
}


@pytest.mark.parametrize(("use", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(loop: Loop, use: Callable[[Loop], Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"OffloadAdamW: .*{message}|{message}.*OffloadAdamW"):
        use(loop)


@pytest.mark.parametrize(("by_module", "set_to_none"), [(False, False), (False, True), (True, True)])
def test_dropped(by_module: bool, set_to_none: bool) -> None:
    """`zero_grad` before the step undoes what has been updated with the gradients."""
    loop = make_loop("ours", accumulation_steps=1).train(2)
    before = loop.weights()
    loss_of(loop.model, 1).backward()
    loop.model.zero_grad() if by_module else loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.optimizer.step()
    assert all(map(torch.equal, loop.weights(), before))
    loop.train(1)


def test_more_backward_passes_than_before() -> None:
    loop = make_loop("ours").train(2)
    loss_of(loop.model, 1).backward()
    with pytest.raises(MisconfigurationException, match=r"behind the last one of its step.*accumulation_steps"):
        loss_of(loop.model, 2).backward()
    loop.optimizer.zero_grad()
    loop.train(1)


def test_interrupted_backward() -> None:
    """`zero_grad` undoes it, and training goes on as if it had not been."""
    loop, other = make_loop("ours", accumulation_steps=1).train(3), make_loop("ours", accumulation_steps=1).train(3)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = loop.model[1].linear1.weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss_of(loop.model, 7).backward()
    handle.remove()
    with pytest.raises(MisconfigurationException, match=r"an exception has interrupted.*zero_grad"):
        loss_of(loop.model, 7).backward()
    loop.optimizer.zero_grad()
    assert all(map(torch.equal, loop.weights(), other.weights()))
    assert loop.train(2).losses == other.train(2).losses


def test_use_of_an_updated_weight_in_backward() -> None:
    """torch's own error, as for every write in place."""
    weight, head = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = OffloadAdamW([weight, head], accumulation_steps=1, worker_cores=1)
    hidden = torch.ones(2, 4, requires_grad=True) @ weight.detach()
    loss = (hidden @ head).sum() + (torch.ones(2, 4) @ weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()


def test_read_in_backward() -> None:
    """A hook's reads of some gradients fix nothing for later ones: norms and clipping are those of all."""
    loop, model = make_loop("ours"), make_model()
    norms: list[list[float]] = []
    for of in (loop.model, model):
        read = norms.append([]) or norms[-1]
        for p in groups_of(of)[0]["params"]:
            p.register_post_accumulate_grad_hook(lambda p, read=read: read.append(float(p.grad.norm())))
    for of in (loop.model, model):
        for number in range(2):
            loss_of(of, number).backward()
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    totals = [clip_grad_norm_(of.parameters(), 0.1) for of in (loop.model, model)]
    torch.testing.assert_close(*totals, rtol=1e-6, atol=0)
    loop.optimizer.step()
    close(loop)
