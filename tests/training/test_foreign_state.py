"""Whole fp32 weights, moments and gradients of single parameters, by DeepSpeed's functions."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from models import LinearLossModule
from side_by_side import NOTHING_LATE

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

LATE: dict[str, Any] = {"update_interval": 4, "publish_lag": 1, "select_interval": 2, "full_warm_up_rounds": 0}
KEYS: dict[str, dict[str, Any]] = {
    "nothing late": NOTHING_LATE,
    "late": LATE,
    "in backward": {"update_interval": 1, "publish_lag": 0},
}


class At(pl.Callback):
    """Calls a function at one of Lightning's hooks."""

    def __init__(self, hook: str, action: Callable[[pl.LightningModule], None]) -> None:
        setattr(self, hook, lambda trainer, module, *_: action(module))


def linear() -> LinearLossModule:
    return LinearLossModule(length=200)


def read(module: pl.LightningModule) -> list[list[Tensor | None]]:
    return [
        [safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq"))]
        for p in module.parameters()
    ]


@pytest.mark.parametrize(("name", "accumulate"), [("nothing late", 1), ("late", 3), ("in backward", 3)])
def test_gradients(name: str, accumulate: int) -> None:
    """Of the whole step, for every parameter, those included that the last micro-batch or the whole step does not use."""
    seen: list[list[Tensor | None]] = []
    model = LinearLossModule(length=200, accumulate=accumulate)
    peek = At("on_before_optimizer_step", lambda m: seen.append([safe_get_full_grad(p) for p in m.parameters()]))
    fit(model, ZenFlowStrategy(**KEYS[name]), steps=4, callbacks=[peek], accumulate_grad_batches=accumulate)
    for step, gradients in enumerate(seen):
        for i, gradient in enumerate(gradients):
            of_micro = [model.gradient(i, step, micro, 0) for micro in range(accumulate)]
            wanted = sum(g for g in of_micro if g is not None) / accumulate
            torch.testing.assert_close(gradient, torch.as_tensor(wanted).expand_as(model.weights[i]))


def test_gradients_are_read_behind_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of matrices may still be on their way to host memory."""
    waits: list[None] = []
    waited: list[int] = []

    class BehindTheHost(HostRuntime):
        def synchronize(self) -> None:
            waits.append(None)

    def peek(module: pl.LightningModule) -> None:
        before = len(waits)
        safe_get_full_grad(next(p for p in module.parameters() if p.dim() > 1))
        waited.append(len(waits) - before)

    monkeypatch.setitem(RUNTIMES, "cpu", BehindTheHost)
    fit(linear(), ZenFlowStrategy(**LATE), callbacks=[At("on_before_optimizer_step", peek)])
    assert waited == [1] * 3


@pytest.mark.parametrize(("name", "accumulate"), [("nothing late", 1), ("late", 2), ("in backward", 2)])
def test_written_state_is_what_training_goes_on_with(name: str, accumulate: int) -> None:
    """Between steps, or before a step's last micro-batch: pending updates do not change it, and device-owned columns follow."""
    model = LinearLossModule(length=200, accumulate=accumulate)
    # In one block of columns of any size, and in a vector.
    value = [torch.full_like(p, 0.25 * i) for i, p in enumerate(model.parameters(), 1)]
    batches = 0

    def write(module: pl.LightningModule) -> None:
        nonlocal batches
        batches += 1
        if batches == 5 * accumulate + accumulate // 2:
            for p, v in zip(module.parameters(), value, strict=True):
                safe_set_full_fp32_param(p, v)
                safe_set_full_optimizer_state(p, 0 * v, "exp_avg")
                safe_set_full_optimizer_state(p, v, "exp_avg_sq")
            for v, state in zip(value, read(module), strict=True):
                for ours, theirs in zip(state, (v, 0 * v, v), strict=True):
                    assert ours is not None and torch.equal(ours, theirs)

    states: list[list[Tensor | None]] = []
    fit(
        model,
        ZenFlowStrategy(**KEYS[name]),
        steps=6,
        callbacks=[At("on_train_batch_end", write), At("on_train_end", lambda m: states.extend(read(m)))],
        accumulate_grad_batches=accumulate,
    )
    for i, (v, state) in enumerate(zip(value, states, strict=True)):
        gradient = sum(g for micro in range(accumulate) if (g := model.gradient(i, 5, micro, 0)) is not None)
        group = model.optimizer_options.groups(5)[0 if v.dim() > 1 else 1]
        exp_avg = (1 - group.beta1) * torch.as_tensor(gradient) / accumulate
        exp_avg_sq = group.beta2 * v + (1 - group.beta2) * (torch.as_tensor(gradient) / accumulate) ** 2
        step_size = group.lr / (1 - group.beta1**6)
        update = exp_avg / (exp_avg_sq.sqrt() / (1 - group.beta2**6) ** 0.5 + group.eps)
        weight = v * (1 - group.lr * group.weight_decay) - step_size * update
        for ours, theirs in zip(state, (weight, exp_avg.expand_as(v), exp_avg_sq), strict=True):
            assert ours is not None
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("keys", "latest"), [(NOTHING_LATE, 1), (LATE, 5), (KEYS["in backward"], 1)], ids=KEYS)
def test_the_model_shows_what_was_written(keys: dict[str, Any], latest: int) -> None:
    """At most S + d steps later; what the device owns, after the next step."""
    written, model = 3, LinearLossModule(length=200)
    shown: list[list[Tensor]] = []
    far = 100.0

    def write(module: pl.LightningModule) -> None:
        shown.append([p.detach().clone() for p in module.parameters()])
        if module.global_step == written:
            for p in module.parameters():
                safe_set_full_fp32_param(p, torch.full_like(p, far))

    # Columns are selected once, so that none is read from the arena later.
    strategy = ZenFlowStrategy(**{**keys, "topk_ratio": 0.3, "select_interval": 0, "weight_prediction": 0})
    fit(model, strategy, steps=written + latest + 1, callbacks=[At("on_train_batch_end", write)])
    for i, before in enumerate(shown[written - 1]):
        new = [(of_step[i] > far / 2).float().mean().item() for of_step in shown[written:]]
        assert before.max() < far / 2 and new[latest - 1] == 1, i
        # Vectors, and of each matrix some columns.
        assert new[0] == 1 if before.dim() < 2 else new[0] > 0, i


def replace_gradient(p: Tensor) -> None:
    safe_set_full_grad(p, torch.zeros_like(p))


BEFORE_THE_STEP = "the gradients of a step are there and have not been applied; call it between steps"
REFUSED: dict[str, tuple[str, Callable[[Tensor], object], type[Exception], str]] = {
    "no such moment": (
        "on_train_batch_end",
        lambda p: safe_get_full_optimizer_state(p, "momentum"),
        ValueError,
        "optim_state_key must be 'exp_avg' or 'exp_avg_sq', got 'momentum'",
    ),
    "another shape": (
        "on_train_batch_end",
        lambda p: safe_set_full_fp32_param(p, torch.zeros(3)),
        ValueError,
        r"new value of weights.0 must have the shape \[31, 29\], got \[3\]",
    ),
    "a gradient after the step": (
        "on_train_batch_end",
        safe_get_full_grad,
        ValueError,
        r"safe_get_full_grad\(weights.0\): .* call it in `on_before_optimizer_step`",
    ),
    "another gradient": (
        "on_before_optimizer_step",
        replace_gradient,
        MisconfigurationException,
        r"`parameter.grad` must not be used between backward and `zero_grad`: .*`parameter.register_hook",
    ),
    "before the step": ("on_before_optimizer_step", safe_get_full_fp32_param, RuntimeError, BEFORE_THE_STEP),
    "in backward": ("on_after_backward", safe_get_full_fp32_param, RuntimeError, BEFORE_THE_STEP),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """In the first step already, when nothing is pending."""
    hook, action, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit(linear(), ZenFlowStrategy(**LATE), steps=1, callbacks=[At(hook, lambda m: action(next(m.parameters())))])


REPLACED_IN_PIECES: dict[str, Callable[[Tensor], object]] = {
    "whole": replace_gradient,
    "a piece": lambda p: safe_set_local_grad(p, torch.zeros_like(p)),
    "several": lambda p: safe_update_full_grad_vectorized([p], lambda gradient, _: gradient),
}


@pytest.mark.parametrize(
    "access",
    [
        safe_get_local_fp32_param,
        safe_get_local_grad,
        lambda p: safe_get_local_optimizer_state(p, "exp_avg"),
        lambda p: safe_set_local_fp32_param(p, torch.zeros(1)),
        lambda p: safe_set_local_optimizer_state(p, torch.zeros(1), "exp_avg"),
    ],
)
def test_state_of_single_pieces_is_refused(access: Callable[[Tensor], object]) -> None:
    callback = At("on_train_batch_end", lambda m: access(next(m.parameters())))
    with pytest.raises(MisconfigurationException, match="safe_set_local_.*: use safe_get_full_"):
        fit(linear(), ZenFlowStrategy(**NOTHING_LATE, stage=3), steps=1, callbacks=[callback])


@pytest.mark.parametrize("name", REPLACED_IN_PIECES)
def test_another_gradient_is_refused_under_stage_3(name: str) -> None:
    """Between steps too, where DeepSpeed asks its optimizer, or writes to `parameter.grad`."""
    replace = At("on_train_batch_end", lambda m: REPLACED_IN_PIECES[name](next(m.parameters())))
    message = r"(safe_set_full_grad\(weights.0\)|`parameter.grad` must not be used).*`parameter.register_hook"
    with pytest.raises((RuntimeError, MisconfigurationException), match=message):
        fit(linear(), ZenFlowStrategy(**NOTHING_LATE, stage=3), steps=1, callbacks=[replace])
