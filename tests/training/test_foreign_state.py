"""Whole fp32 weights, moments and gradients of single parameters, by DeepSpeed's functions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
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
from typing_extensions import override

from callbacks import At
from harness import Case, Run, fit, run_here
from lightning_zenflow import ZenFlowStrategy
from models import LinearLossModule, TestModule
from rank_processes import run_on_ranks
from same_bits import assert_is_adamw, assert_same_tensors
from side_by_side import NOTHING_LATE

LATE: dict[str, Any] = {"update_interval": 4, "publish_lag": 1, "select_interval": 2, "full_warm_up_rounds": 0}
KEYS: dict[str, dict[str, Any]] = {
    "nothing late": NOTHING_LATE,
    "late": LATE,
    "in backward": {"update_interval": 1, "publish_lag": 0},
}
KINDS = ("exp_avg", "exp_avg_sq")


def linear() -> LinearLossModule:
    return LinearLossModule(length=200)


def read(parameters: Sequence[Any]) -> list[list[Tensor]]:
    """[kind][parameter]"""
    moments = [[safe_get_full_optimizer_state(p, kind) for p in parameters] for kind in KINDS]
    return [[safe_get_full_fp32_param(p) for p in parameters], *moments]


def parameters_of(module: pl.LightningModule) -> list[Tensor]:
    """Trained ones, in the order of the parameter groups."""
    assert isinstance(module, TestModule)
    return [p for group in module.parameter_groups() for p in group]


class State(pl.Callback):
    """Writes what each rank reads to files in a folder: gradients of every step, the state after a step (counted from 1) and at the end."""

    def __init__(self, folder: Path, *, read_after: int) -> None:
        self.folder, self.read_after = folder, read_after
        self.gradients: list[list[Tensor]] = []

    def save(self, trainer: pl.Trainer, name: str, found: Any) -> None:
        torch.save(found, self.folder / f"{name}.{trainer.global_rank}.pt")

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients.append([safe_get_full_grad(p) for p in parameters_of(pl_module)])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.read_after:
            self.save(trainer, "middle", read(parameters_of(pl_module)))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer, "end", read(parameters_of(pl_module)))
        self.save(trainer, "gradients", self.gradients)


def found(folder: Path, name: str, ranks: int) -> Any:
    """What rank 0 has read; the others have read the same."""
    first, *others = (torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks))
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            assert_same_tensors(ours, theirs, name)
    return first


def assert_found(case: Case, runs: Sequence[Run], short: Run, folder: Path) -> None:
    """What `State` has read is the state of a run at its end, and in the middle that of a run with as many steps; and the gradients."""
    for name, run in (("end", runs[0]), ("middle", short)):
        for kind, tensors in zip(("master", *KINDS), found(folder, name, len(runs)), strict=True):
            assert_same_tensors(tensors, [x.float() for x in getattr(run, kind)], kind)
            assert all(x.dtype == torch.float32 for x in tensors)
    _, wanted, _ = case.fixed_gradients(world_size=len(runs))
    for ours, theirs in zip(found(folder, "gradients", len(runs)), wanted, strict=True):
        assert_same_tensors(ours, theirs, "gradient")


STATES: dict[str, Case] = {
    "S=4, d=1, bf16 moments": Case(steps=7).with_keys(moments_dtype="bfloat16"),
    "S=1, d=0, int8 moments": Case(steps=7, update_interval=1, publish_lag=0, max_norm=0.5).with_keys(
        moments_dtype="int8"
    ),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STATES)
def test_states_and_gradients(name: str, ranks: int, tmp_path: Path) -> None:
    case = replace(STATES[name], topk_ratio=0.0, model_options={"shapes": ((31, 29), (53, 7), (37,), (1,))})
    case = replace(case, callbacks=(State(tmp_path, read_after=3),), flush_after=(3,))
    cases = {"whole": case, "short": replace(case, steps=3, callbacks=())}
    runs = run_on_ranks(cases) if ranks > 1 else {name: [run_here(case)] for name, case in cases.items()}
    assert_found(case, runs["whole"], runs["short"][0], tmp_path)
    assert_is_adamw(case, *runs["whole"])


@pytest.mark.parametrize("name", ["late", "in backward"])
def test_gradients_that_some_micro_batches_do_not_have(name: str) -> None:
    seen: list[list[Tensor | None]] = []
    model = LinearLossModule(length=200, accumulate=3)
    peek = At("on_before_optimizer_step", lambda _: seen.append([safe_get_full_grad(p) for p in model.parameters()]))
    fit(model, ZenFlowStrategy(**KEYS[name]), steps=4, callbacks=[peek], accumulate_grad_batches=3)
    for step, gradients in enumerate(seen):
        for i, gradient in enumerate(gradients):
            of_micro = [model.gradient(i, step, micro, 0) for micro in range(3)]
            wanted = sum(g for g in of_micro if g is not None) / 3
            torch.testing.assert_close(gradient, torch.as_tensor(wanted).expand_as(model.weights[i]))


@pytest.mark.parametrize(("name", "accumulate"), [("nothing late", 1), ("late", 2)])
def test_written_state_is_what_training_goes_on_with(name: str, accumulate: int) -> None:
    """Between steps, or before a step's last micro-batch: pending updates do not change it, and device-owned columns follow."""
    model = LinearLossModule(length=200, accumulate=accumulate)
    # In one block of columns of any size, and in a vector.
    value = [torch.full_like(p, 0.25 * i) for i, p in enumerate(model.parameters(), 1)]
    batches = 0

    def write(_: pl.Trainer) -> None:
        nonlocal batches
        batches += 1
        if batches == 5 * accumulate + accumulate // 2:
            for p, v in zip(model.parameters(), value, strict=True):
                safe_set_full_fp32_param(p, v)
                safe_set_full_optimizer_state(p, 0 * v, "exp_avg")
                safe_set_full_optimizer_state(p, v, "exp_avg_sq")
            for ours, theirs in zip(read([*model.parameters()]), (value, [0 * v for v in value], value), strict=True):
                assert_same_tensors(ours, theirs)

    states: list[list[Tensor]] = []
    fit(
        model,
        ZenFlowStrategy(**KEYS[name]),
        steps=6,
        callbacks=[
            At("on_train_batch_end", write),
            At("on_train_end", lambda _: states.extend(read([*model.parameters()]))),
        ],
        accumulate_grad_batches=accumulate,
    )
    for i, (v, *state) in enumerate(zip(value, *states, strict=True)):
        gradient = sum(g for micro in range(accumulate) if (g := model.gradient(i, 5, micro, 0)) is not None)
        group = model.optimizer_options.groups(5)[0 if v.dim() > 1 else 1]
        exp_avg = (1 - group.beta1) * torch.as_tensor(gradient) / accumulate
        exp_avg_sq = group.beta2 * v + (1 - group.beta2) * (torch.as_tensor(gradient) / accumulate) ** 2
        step_size = group.lr / (1 - group.beta1**6)
        update = exp_avg / (exp_avg_sq.sqrt() / (1 - group.beta2**6) ** 0.5 + group.eps)
        weight = v * (1 - group.lr * group.weight_decay) - step_size * update
        for ours, theirs in zip(state, (weight, exp_avg.expand_as(v), exp_avg_sq), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("keys", "latest"), [(NOTHING_LATE, 1), (LATE, 5), (KEYS["in backward"], 1)], ids=KEYS)
def test_the_model_shows_what_was_written(keys: dict[str, Any], latest: int) -> None:
    """At most S + d steps later; what the device owns, after the next step."""
    written, model = 3, LinearLossModule(length=200)
    shown: list[list[Tensor]] = []
    far = 100.0

    def write(trainer: pl.Trainer) -> None:
        shown.append([p.detach().clone() for p in model.parameters()])
        if trainer.global_step == written:
            for p in model.parameters():
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
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """In the first step already, when nothing is pending."""
    hook, action, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit(
            linear(),
            ZenFlowStrategy(**LATE),
            steps=1,
            callbacks=[At(hook, lambda t: action(next(t.lightning_module.parameters())))],
        )


REPLACED_IN_PIECES: dict[str, Callable[[Tensor], object]] = {
    "whole": replace_gradient,
    "a piece": lambda p: safe_set_local_grad(p, torch.zeros_like(p)),
    "several": lambda p: safe_update_full_grad_vectorized([p], lambda gradient, _: gradient),
}


PIECES: list[Callable[[Tensor], object]] = [
    safe_get_local_fp32_param,
    safe_get_local_grad,
    lambda p: safe_get_local_optimizer_state(p, "exp_avg"),
    lambda p: safe_set_local_fp32_param(p, torch.zeros(1)),
    lambda p: safe_set_local_optimizer_state(p, torch.zeros(1), "exp_avg"),
]


def test_what_is_refused_under_stage_3() -> None:
    """State of single pieces; and another gradient between steps too, where DeepSpeed asks its optimizer, or writes to `parameter.grad`."""
    no_gradient = r"(safe_set_full_grad\(weights.0\)|`parameter.grad` must not be used).*`parameter.register_hook"

    def tries(trainer: pl.Trainer) -> None:
        parameter = next(trainer.lightning_module.parameters())
        for access in PIECES:
            with pytest.raises(MisconfigurationException, match="safe_set_local_.*: use safe_get_full_"):
                access(parameter)
        for replaces in REPLACED_IN_PIECES.values():
            with pytest.raises((RuntimeError, MisconfigurationException), match=no_gradient):
                replaces(parameter)

    fit(linear(), ZenFlowStrategy(**NOTHING_LATE, stage=3), steps=1, callbacks=[At("on_train_batch_end", tries)])
