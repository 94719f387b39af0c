"""`state_dict` has the layout of `torch.optim.AdamW`'s, is exact at any moment between two steps, and continues with equal bits. That torch
continues it, and the other way round: tests/gpu/test_gpu_offload_adamw, on the CPU too.
"""

import copy
import io
from typing import Any

import pytest
import torch

from lightning_zenflow import OffloadAdamW
from plain_loops import Loop, groups_of, loss_of, make_loop, make_model


def saved(loop: Loop) -> tuple[dict[str, Any], dict[str, Any]]:
    """The training in a file, and read from it."""
    file = io.BytesIO()
    torch.save((loop.model.state_dict(), loop.optimizer.state_dict()), file)
    file.seek(0)
    model, optimizer = torch.load(file)
    return model, optimizer


def go_on(files: tuple[dict[str, Any], dict[str, Any]], steps: int, **keys: Any) -> Loop:
    model_state, optimizer_state = copy.deepcopy(files)
    model = make_model(model_state["0.weight"].dtype)
    model.load_state_dict(model_state)
    loop = make_loop("ours", model=model, lr=1.0, **keys)
    loop.optimizer.load_state_dict(optimizer_state)
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (1 + step / 10), last_epoch=-1)
    loop.scheduler.last_epoch = loop.steps = steps
    return loop


@pytest.mark.parametrize(
    "keys",
    [{}, {"dtype": torch.bfloat16}, {"moments_dtype": "bfloat16"}, {"moments_dtype": "int8"}],
    ids=["float32", "bfloat16 weights", "bfloat16 moments", "int8 moments"],
)
def test_equal_bits(keys: dict[str, Any]) -> None:
    loop = make_loop("ours", accumulation_steps=1, **keys).train(5, max_norm=lambda step: 1.0 if step == 3 else 50.0)
    files = saved(loop)
    again = go_on(files, 5, accumulation_steps=1, **{k: v for k, v in keys.items() if k != "dtype"})
    loop.losses.clear()
    for one in (loop, again):
        one.scheduler = torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda step: 1 / (1 + step / 10))
    assert again.train(4).losses == loop.train(4).losses
    assert all(map(torch.equal, again.weights(), loop.weights()))
    of_torch = make_loop("torch").train(1).optimizer.state_dict()["param_groups"]
    assert [{*group} for group in files[1]["param_groups"]] == [{*group} for group in of_torch]
    of_first = files[1]["state"][0]
    assert {*of_first} == {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if "dtype" in keys else set())
    assert of_first["exp_avg"].dtype == torch.float32
    assert of_first["exp_avg"].shape == next(iter(groups_of(loop.model)))["params"][0].shape


def test_between_micro_batches() -> None:
    """It is that of the last step, and the gradients so far stay."""
    loop, other = make_loop("ours", accumulation_steps=2), make_loop("ours", accumulation_steps=2)
    for one in (loop, other):
        one.train(3, micro_batches=lambda _: 2)
        (loss_of(one.model, 1) / 2).backward()
    before = saved(other)
    (loss_of(loop.model, 2) / 2).backward()
    (loss_of(other.model, 2) / 2).backward()
    for one in (loop, other):
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert all(map(torch.equal, loop.weights(), other.weights()))
    assert before[1]["state"][0]["step"] == 3


def test_behind_the_last_backward_pass() -> None:
    loop = make_loop("ours", accumulation_steps=1)
    loss_of(loop.model, 1).backward()
    with pytest.raises(RuntimeError, match=r"state_dict must be called between steps.*optimizer\.step\(\)"):
        loop.optimizer.state_dict()
    loop.optimizer.step()
    assert loop.optimizer.state_dict()["state"][0]["step"] == 1


def test_before_the_first_step() -> None:
    loop = make_loop("ours")
    empty = loop.optimizer.state_dict()
    assert empty["state"] == {}
    torch.optim.AdamW(groups_of(make_model())).load_state_dict(empty)
    of_one_group = OffloadAdamW(make_model().parameters(), worker_cores=1).state_dict()
    with pytest.raises(ValueError, match="must have parameter groups of"):
        loop.optimizer.load_state_dict(of_one_group)
    loop.optimizer.load_state_dict(make_loop("torch").optimizer.state_dict())
    loop.train(1)


def test_hooks() -> None:
    """torch's own, around `state_dict` and `load_state_dict`; their results replace the state."""
    said = list[str]()

    def before_load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        said.append("before load")
        return {**state, "state": {}}

    def behind(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        said.append(f"behind {len(state['state'])}")
        return {**state, "more": 1}

    loop = make_loop("ours").train(1)
    optimizer = loop.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: said.append("before"))
    optimizer.register_state_dict_post_hook(behind)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda _: said.append("behind load"))
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    n = sum(p.requires_grad for p in loop.model.parameters())
    assert said == ["before", f"behind {n}", "before load", "behind load"]
    assert not optimizer.state_dict()["state"][0]["exp_avg"].any()
