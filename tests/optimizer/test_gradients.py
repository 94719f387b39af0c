"""What stands in `parameter.grad` between a gradient's arrival and the step."""

import copy
import pickle
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


@pytest.fixture
def gradients() -> list[Tensor]:
    """torch's gradients of that backward pass."""
    model = make_model()
    loss_of(model, 1).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def ours(loop: Loop) -> list[Any]:
    return [p.grad for p in loop.model.parameters() if p.requires_grad]


READS: dict[str, Callable[[Tensor], Any]] = {
    "clone": torch.clone,
    "sum": lambda g: g.abs().sum(),
    "infinity norm": lambda g: g.norm(float("inf")),
    "norm": lambda g: g.norm(),
    "norm of rows": lambda g: torch.linalg.vector_norm(g, dim=0),
    "item": lambda g: g.flatten()[0].item(),
    "list": lambda g: g.tolist(),
    "array": lambda g: torch.from_numpy(g.cpu().numpy()),
    "index": lambda g: g[0],
    "product": lambda g: g * 2,
    "detached": lambda g: g.detach().data.square(),
    "deep copy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "stack": lambda g: torch.stack([g, g]),
    "finite": torch.isfinite,
    "added to another": lambda g: g.new_ones(g.shape).add_(g),
    "multiplied to another": lambda g: g.new_ones(g.shape).mul_(g),
    "views": lambda g: torch.cat([*g.t().flatten().split(3)]).numpy().tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads(loop: Loop, gradients: list[Tensor], read: Callable[[Tensor], Any]) -> None:
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
    close(loop)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping(loop: Loop, gradients: list[Tensor], foreach: bool | None, order: float) -> None:
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


def _assign(loop: Loop) -> None:
    parameter = loop.model[-1].weight
    parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()


def _remove_one(loop: Loop) -> None:
    loop.model[-1].weight.grad = None
    loop.optimizer.step()


def _scale_some(loop: Loop) -> None:
    clip_grad_norm_(loop.model[0].parameters(), 1e-3)
    loop.optimizer.step()


def _read_behind_step(loop: Loop) -> None:
    loop.optimizer.step()
    loop.model[-1].weight.grad.sum()


def _backward_behind_step(loop: Loop) -> None:
    loop.optimizer.step()
    loss_of(loop.model, 2).backward()


def _second_step(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.step()


REFUSED: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "clip by value": (lambda loop: clip_grad_value_(loop.model.parameters(), 0.1), "would change it"),
    "noise": (lambda loop: loop.model[-1].weight.grad.add_(torch.ones(50, 32)), "would change it"),
    "zero": (lambda loop: loop.model[-1].weight.grad.zero_(), "would change it"),
    "copy": (lambda loop: loop.model[-1].weight.grad.copy_(torch.ones(50, 32)), "would change it"),
    "by elements": (lambda loop: loop.model[-1].weight.grad.mul_(torch.ones(50, 32)), "by one number"),
    "row": (lambda loop: loop.model[-1].weight.grad.__setitem__(0, 0.0), "would change it"),
    "slice": (lambda loop: loop.model[-1].weight.grad[:3].mul_(0.5), "would change it"),
    "by mask": (lambda loop: loop.model[-1].weight.grad.__setitem__(torch.ones(50, 32) > 0, 0.0), "would change it"),
    "through data": (lambda loop: loop.model[-1].weight.grad.data.view(-1).zero_(), "would change it"),
    "assigned": (_assign, "must not be assigned"),
    "removed": (_remove_one, "must not be assigned"),
    "some clipped": (_scale_some, "must be scaled alike"),
    "read behind the step": (_read_behind_step, "must be used before"),
    "backward behind the step": (_backward_behind_step, r"`optimizer.zero_grad\(\)` must come before"),
    "two steps": (_second_step, "a backward pass of its own"),
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
    close(loop)


def test_more_backward_passes_than_before() -> None:
    loop = make_loop("ours").train(2)
    loss_of(loop.model, 1).backward()
    with pytest.raises(MisconfigurationException, match=r"behind the last one of its step.*accumulation_steps"):
        loss_of(loop.model, 2).backward()
    loop.optimizer.zero_grad()
    loop.train(1)
    close(loop)


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
    close(loop, other)


def test_use_of_an_updated_weight_in_backward() -> None:
    """torch's own error, as for every write in place."""
    weight, head = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = OffloadAdamW([weight, head], accumulation_steps=1, worker_cores=1)
    hidden = torch.ones(2, 4, requires_grad=True) @ weight.detach()
    loss = (hidden @ head).sum() + (torch.ones(2, 4) @ weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.close()
