"""Whole fp32 weights, moments and gradients of single parameters, by DeepSpeed's functions. Evaluation, the user's hooks, checkpoints and
readers of the optimizer's state see exact values, also in the middle of a run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import utils
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from callbacks import At
from harness import EVERYTHING, Case, Run, fit, snapshot
from lightning_zenflow import ZenFlowStrategy
from models import SHAPES, LinearLossModule, TestModule
from rank_processes import run_each
from same_bits import assert_is_adamw
from side_by_side import HOW
from zenflow_reference import AdamWState

LATE, STAGE_3 = HOW["late"], HOW["stage 3"]
KINDS = ("exp_avg", "exp_avg_sq")


def read(parameters: Sequence[Any]) -> list[list[Tensor]]:
    """[kind][parameter]"""
    moments = [[utils.safe_get_full_optimizer_state(p, kind) for p in parameters] for kind in KINDS]
    return [[utils.safe_get_full_fp32_param(p) for p in parameters], *moments]


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
        parameters = parameters_of(pl_module)
        self.gradients.append([utils.safe_get_full_grad(p) for p in parameters])
        # The same is in `grad`.
        given = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(given)
        torch.testing.assert_close([g.clone().float() for g in given], self.gradients[-1], rtol=0, atol=0)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in self.gradients[-1]]).norm())

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
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def assert_found(case: Case, runs: Sequence[Run], short: Run, folder: Path) -> None:
    """What `State` has read is the state of a run at its end, and in the middle that of a run with as many steps; and the gradients."""
    for name, run in (("end", runs[0]), ("middle", short)):
        wanted = [[x.float() for x in getattr(run, kind)] for kind in ("master", *KINDS)]
        torch.testing.assert_close(found(folder, name, len(runs)), wanted, rtol=0, atol=0)
    _, wanted, _ = case.fixed_gradients(world_size=len(runs))
    torch.testing.assert_close(found(folder, "gradients", len(runs)), wanted, rtol=0, atol=0)


STATES: dict[str, Case] = {
    "S=4, d=1, bf16 moments": Case(steps=7).with_keys(moments_dtype="bfloat16"),
    "S=1, d=0, int8 moments": Case(steps=7, update_interval=1, publish_lag=0, max_norm=0.5).with_keys(
        moments_dtype="int8"
    ),
    # The last parameter has no gradient in some micro-batches.
    "accumulated": Case(steps=7, accumulate=3),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STATES)
def test_states_and_gradients(name: str, ranks: int, tmp_path: Path) -> None:
    shapes = SHAPES if name == "accumulated" else ((31, 29), (53, 7), (37,), (1,))
    case = replace(STATES[name], topk_ratio=0.0, model_options={"shapes": shapes})
    case = replace(case, callbacks=(State(tmp_path, read_after=3),), flush_after=(3,))
    cases = {"whole": case, "short": replace(case, steps=3, callbacks=())}
    runs = run_each(cases, ranks=ranks)
    assert_found(case, runs["whole"], runs["short"][0], tmp_path)
    assert_is_adamw(case, *runs["whole"])


@pytest.mark.parametrize(("name", "accumulate"), [("nothing late", 1), ("late", 2)])
def test_written_state_is_what_training_goes_on_with(name: str, accumulate: int) -> None:
    """Between steps, or before a step's last micro-batch: pending updates do not change it, and device-owned columns follow."""
    model = LinearLossModule(length=200, accumulate=accumulate)
    # In one block of columns of any size, and in a vector.
    parameters = parameters_of(model)
    value = [torch.full_like(p, 0.25 * i) for i, p in enumerate(parameters, 1)]
    batches = 0

    def write(_: pl.Trainer) -> None:
        nonlocal batches
        batches += 1
        if batches == 5 * accumulate + accumulate // 2:
            for p, v in zip(parameters, value, strict=True):
                utils.safe_set_full_fp32_param(p, v)
                utils.safe_set_full_optimizer_state(p, 0 * v, "exp_avg")
                utils.safe_set_full_optimizer_state(p, v, "exp_avg_sq")
            written = [value, [0 * v for v in value], value]
            torch.testing.assert_close(read(parameters), written, rtol=0, atol=0)

    states: list[list[Tensor]] = []
    reads = At("on_train_end", lambda _: states.extend(read(parameters)))
    options = {"callbacks": [At("on_train_batch_end", write), reads], "accumulate_grad_batches": accumulate}
    fit(model, ZenFlowStrategy(**HOW[name]), steps=6, **options)
    exact = AdamWState(weights=value, exp_avg=[0 * v for v in value], exp_avg_sq=value, counts=[5] * len(value))
    _, gradients, groups = Case(steps=6, accumulate=accumulate).fixed_gradients()
    exact.step(gradients[5], groups[5])
    torch.testing.assert_close(states, [exact.weights, exact.exp_avg, exact.exp_avg_sq], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("how", "latest"), [("nothing late", 1), ("late", 5), ("in backward", 1)])
def test_the_model_shows_what_was_written(how: str, latest: int) -> None:
    """At most S + d steps later; what the device owns, after the next step."""
    written, model = 3, LinearLossModule(length=200)
    shown: list[list[Tensor]] = []
    far = 100.0

    def write(trainer: pl.Trainer) -> None:
        shown.append([p.detach().clone() for p in model.parameters()])
        if trainer.global_step == written:
            for p in model.parameters():
                utils.safe_set_full_fp32_param(p, torch.full_like(p, far))

    # Columns are selected once, so that none is read from the arena later.
    strategy = ZenFlowStrategy(**{**HOW[how], "topk_ratio": 0.3, "select_interval": 0, "weight_prediction": 0})
    fit(model, strategy, steps=written + latest + 1, callbacks=[At("on_train_batch_end", write)])
    for i, before in enumerate(shown[written - 1]):
        new = [(of_step[i] > far / 2).float().mean().item() for of_step in shown[written:]]
        assert before.max() < far / 2 and new[latest - 1] == 1, i
        # Vectors, and of each matrix some columns.
        assert new[0] == 1 if before.dim() < 2 else new[0] > 0, i


def replace_gradient(p: Tensor) -> None:
    utils.safe_set_full_grad(p, torch.zeros(p.shape, dtype=p.dtype))


BETWEEN, BEFORE = "on_train_batch_end", "on_before_optimizer_step"
REFUSED: list[tuple[dict[str, Any], str, Callable[[Tensor], object], str]] = [
    (
        LATE,
        BETWEEN,
        lambda p: utils.safe_get_full_optimizer_state(p, "momentum"),
        "optim_state_key must be .* got 'momentum'",
    ),
    (
        LATE,
        BETWEEN,
        lambda p: utils.safe_set_full_fp32_param(p, torch.zeros(3)),
        r"weights.0 must have the shape \[31, 29\]",
    ),
    (
        LATE,
        BETWEEN,
        utils.safe_get_full_grad,
        r"safe_get_full_grad\(weights.0\): .* call it in `on_before_optimizer_step`",
    ),
    (LATE, BEFORE, replace_gradient, "copy_.* would change it: .*`parameter.register_hook"),
    (LATE, BEFORE, utils.safe_get_full_fp32_param, "have not been applied; call it between steps"),
    # State of single pieces.
    *(
        (STAGE_3, BETWEEN, access, "safe_set_local_.*: use safe_get_full_")
        for access in (
            utils.safe_get_local_fp32_param,
            utils.safe_get_local_grad,
            lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
            lambda p: utils.safe_set_local_fp32_param(p, torch.zeros(1)),
            lambda p: utils.safe_set_local_optimizer_state(p, torch.zeros(1), "exp_avg"),
        )
    ),
    # Another gradient between steps too, where DeepSpeed asks its optimizer, or writes to `parameter.grad`.
    *(
        (STAGE_3, BETWEEN, replaces, r"(safe_set_full_grad\(weights.0\)|must be used before).*`parameter.register_hook")
        for replaces in (
            replace_gradient,
            lambda p: utils.safe_set_local_grad(p, torch.zeros_like(p)),
            lambda p: utils.safe_update_full_grad_vectorized([p], lambda gradient, _: gradient),
        )
    ),
]


@pytest.mark.parametrize(("keys", "hook", "action", "message"), REFUSED)
def test_refused(keys: dict[str, Any], hook: str, action: Callable[[Tensor], object], message: str) -> None:
    """In the first step already, when nothing is pending."""
    act = At(hook, lambda t: action(next(t.lightning_module.parameters())))
    with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=message):
        fit(LinearLossModule(), ZenFlowStrategy(**keys), steps=1, callbacks=[act])


CASE = Case(steps=11, topk_ratio=0.05, update_interval=4, publish_lag=1, max_norm=1.0, strategy_options=EVERYTHING)


@pytest.mark.parametrize(("accumulate", "interval"), [(1, 3), (3, 2)])
def test_in_mid_run(accumulate: int, interval: int) -> None:
    """Also between the micro-batches of a step; nothing of it disturbs what follows. Other weights are written at the end of training."""
    case, seen = replace(CASE, accumulate=accumulate), dict[int, list[Tensor]]()
    model = case.make_model()

    def watch(trainer: pl.Trainer) -> None:
        seen[trainer.global_step] = snapshot(model)

    def overwrite(trainer: pl.Trainer) -> None:
        watch(trainer)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7)

    hooks = {"on_validation_start": watch, "on_train_end": overwrite}
    fit(
        model,
        case.make_strategy(),
        steps=case.steps,
        gradient_clip_val=case.max_norm,
        accumulate_grad_batches=accumulate,
        val_check_interval=interval,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        callbacks=[At(*hook) for hook in hooks.items()],
    )
    batches = range(0, case.steps * accumulate + 1, interval)
    assert sorted(seen) == sorted({batch // accumulate for batch in batches} | {case.steps})
    for step, weights in seen.items():
        exact = replace(case, steps=step).adamw().weights
        torch.testing.assert_close([w.double() for w in weights], list(exact), rtol=1e-6, atol=1e-6)
    assert all((p == 7).all() for p in model.parameters())
