"""Jobs that are submitted in backward: the same bits as at the end of the step, and what differs where a gradient is not finite."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from harness import APPROXIMATE, AUTO, RESELECTING, Case, Run, fit, make_trainer, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.staggered import blocks_wanted
from lightning_zenflow.zero import build
from networks import SmallNet
from rank_processes import run_on_ranks
from same_bits import assert_same_run, assert_same_state

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

BUCKETS = {"reduce_bucket_size": 200}
"""Elements; small enough that gradients of these models arrive one after the other."""
CASE = Case(model="TiedNet", steps=10, topk_ratio=0.3, update_interval=1, publish_lag=0, strategy_options=BUCKETS)
CASES = {
    "TiedNet": CASE,
    "SmallNet": replace(CASE, model="SmallNet"),
    "parameters without a gradient": replace(CASE, model="LinearLossModule"),
    "bf16": replace(CASE, precision="bf16-true"),
    "S=2, nothing on the device": replace(CASE, update_interval=2, topk_ratio=0.0),
    "accumulation": replace(CASE, accumulate=3),
    "accumulation on the host": replace(CASE, accumulate=2).with_keys(accumulate_on="host"),
    "reselection": replace(CASE, update_interval=2).with_keys(**RESELECTING),
    "flush in between": replace(CASE, flush_after=(5, 6)),
    "checkpointing": replace(CASE, model_options={"checkpoint": "non-reentrant", "head_in_checkpoint": True}),
    "reentrant checkpointing": replace(CASE, model_options={"checkpoint": "reentrant"}),
    "frozen from the start": replace(CASE, model_options={"frozen": (0, 2)}),
    "frozen and unfrozen": replace(CASE, model="FreezingModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}),
    "a layer used now and then": replace(CASE, model_options={"used_every": 3}),
    "warm-up": replace(CASE, warm_up=4),
    "weight prediction and provisional update": CASE.with_keys(**APPROXIMATE),
    "S=2": replace(CASE, update_interval=2),
    "S=2, frozen and unfrozen": replace(
        CASE, update_interval=2, model="FreezingModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}
    ),
    "S=2, a layer used now and then": replace(CASE, update_interval=2, model_options={"used_every": 3}),
    "S=4, everything": replace(CASE, update_interval=4, flush_after=(5, 6)).with_keys(**APPROXIMATE, **RESELECTING),
    "changes of schedule": replace(
        CASE,
        steps=20,
        schedules=((3, 2, 1), (8, 1, 0), (11, 4, 1), (12, 1, 1), (14, 1, 0), (15, 2, 0), (17, 4, 2)),
    ).with_keys(**APPROXIMATE, **AUTO),
}


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that was submitted in backward."""

    step: int
    block: int
    factor: float


def run_watched(case: Case, **options: Any) -> tuple[Run, list[Submission]]:
    """A run, and its jobs that were submitted in backward."""
    submissions: list[Submission] = []
    submit_in_backward = JobQueue.submit_in_backward

    def watched(self: JobQueue, block: int, step: int, factor: Tensor, *, beta1: float) -> None:
        submissions.append(Submission(step=step, block=block, factor=float(factor)))
        submit_in_backward(self, block, step, factor, beta1=beta1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobQueue, "submit_in_backward", watched)
        return run_here(case, **options), submissions


def run_at_the_end(case: Case) -> Run:
    """The case with the same blocks and the same first schedule, all submitted at the end of their steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build,
            "SchedulePolicy",
            lambda *args, **options: SchedulePolicy(*args, **{**options, "hides_in_backward": True}),
        )
        patch.setattr(
            build,
            "blocks_wanted",
            lambda intervals, numel, **_: blocks_wanted(intervals, in_backward=True, numel=numel),
        )
        run, submissions = run_watched(case.with_keys(optimizer_in_backward=False))
    assert not submissions
    return run


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_at_the_end_of_the_step(name: str) -> None:
    run, submissions = run_watched(CASES[name])
    assert submissions
    assert_same_run(run, run_at_the_end(CASES[name]))


def test_all_blocks_are_submitted_in_backward() -> None:
    """Also of the first step, because nothing is selected and nothing is clipped; the last layers' come first."""
    _, submissions = run_watched(CASE)
    of_step = [
        [submission.block for submission in submissions if submission.step == step] for step in range(1, CASE.steps + 1)
    ]
    blocks = sorted(of_step[0])
    assert blocks == list(range(len(blocks))) and len(blocks) > 8
    assert all(sorted(blocks_of_step) == blocks for blocks_of_step in of_step)
    assert all(submission.factor == 1.0 for submission in submissions)


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, publish_lag=1),
        CASE.with_keys(overlap_step=False),
    ],
    ids=["d=1", "synchronous"],
)
def test_nothing_is_submitted_in_backward_with_a_lag(case: Case) -> None:
    assert run_watched(replace(case, steps=4))[1] == []


def test_two_ranks() -> None:
    """Whose partitions cut parameters."""
    names = ("TiedNet", "parameters without a gradient", "accumulation")
    cases = {name: CASES[name] for name in names}
    cases |= {f"{name}, late": CASES[name].with_keys(optimizer_in_backward=False) for name in names}
    clipped = CLIPPED["not finite"]
    cases |= {"clipped": clipped, "clipped, late": clipped.with_keys(optimizer_in_backward=False)}
    runs = run_on_ranks(cases)
    for name in names:
        for ours, theirs in zip(runs[name], runs[f"{name}, late"], strict=True):
            assert_same_run(ours, theirs)
    for ours, theirs in zip(runs["clipped"], runs["clipped, late"], strict=True):
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_whose_gradients_are_all_not_finite_changes_nothing(factor: float) -> None:
    case = replace(CASE, model="HostileModule", model_options={"factors": {4: factor}})
    run, submissions = run_watched(case)
    assert run.skipped == 1
    assert {math.isnan(submission.factor) for submission in submissions if submission.step == 5} == {True}
    assert_same_run(run, run_at_the_end(case))


def test_nothing_is_shown_from_the_first_gradient_on_that_is_not_finite() -> None:
    """And nothing exact has changed: the next steps have the bits of a run whose blocks were submitted at the end."""
    case = replace(CASE, model="LinearLossModule", model_options={"not_finite": {(4, 0): math.inf}})
    run, submissions = run_watched(case)
    assert run.skipped == 1
    factors = [submission.factor for submission in submissions if submission.step == 5]
    applied = [not math.isnan(factor) for factor in factors]
    assert applied == sorted(applied, reverse=True)  # first those that are, then those that are not
    assert False in applied
    assert all(torch.isfinite(w).all() for of_step in [*run.shown, run.weights] for w in of_step)
    # That gradient is part of all later blocks' steps, never of this one's.
    assert all(not math.isnan(submission.factor) for submission in submissions if submission.step != 5)
    # The gradients of this model do not depend on the weights.
    assert_same_state(run, run_at_the_end(case))


CLIPPED = {
    "clipped": replace(CASE, model="LinearLossModule", max_norm=0.5),
    "two groups, accumulated": replace(CASE, model="LinearLossModule", max_norm=0.5, accumulate=2),
    "nothing on the device": replace(CASE, model="LinearLossModule", max_norm=0.5, topk_ratio=0.0),
    "S=2": replace(CASE, model="LinearLossModule", max_norm=0.5, update_interval=2),
    "S=4": replace(CASE, model="LinearLossModule", max_norm=0.5, update_interval=4, steps=14),
    "flushes": replace(CASE, model="LinearLossModule", max_norm=0.5, flush_after=(3, 4, 8)),
    "reselection": replace(CASE, model="LinearLossModule", max_norm=0.5).with_keys(**RESELECTING),
    "warm-up": replace(CASE, model="LinearLossModule", max_norm=0.5, warm_up=4),
    "bf16": replace(CASE, model="LinearLossModule", max_norm=0.5, precision="bf16-true"),
    "not finite": replace(
        CASE, model="LinearLossModule", max_norm=0.5, model_options={"not_finite": {(4, 0): math.nan, (6, 1): math.inf}}
    ),
    "frozen and unfrozen": replace(
        CASE, model="FreezingModule", max_norm=0.5, model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}
    ),
    "changes of schedule": replace(CASES["changes of schedule"], model="LinearLossModule", max_norm=0.5),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_adamw_is_exact_in_the_state(name: str) -> None:
    """The gradients of these models do not depend on the weights, so that the shown ones, with predicted factors, change nothing else."""
    run, submissions = run_watched(CLIPPED[name])
    assert submissions
    assert_same_state(run, run_at_the_end(CLIPPED[name]))
    factors = {submission.factor for submission in submissions}
    assert len(factors) > 1 and any(factor < 1 for factor in factors)


def test_shown_weights_differ_by_a_bounded_part_of_one_update() -> None:
    """With a fixed sequence of gradients: at most (1 - beta1) times the learning rate times the factor's relative error, and only once."""
    case = replace(CLIPPED["nothing on the device"], steps=20)
    run, _ = run_watched(case)
    exact = run_at_the_end(case)
    largest = 0.0
    for shown, expected in zip(run.shown, exact.shown, strict=True):
        largest = max([largest, *(float((a - b).abs().max()) for a, b in zip(shown, expected, strict=True))])
    group = case.optimizer.groups(0)[0]
    assert 0 < largest < 2 * group.lr


class ChangesRate(pl.Callback):
    """Changes the learning rate at a hook after backward, or at one before it."""

    def __init__(self, *, after_backward: bool) -> None:
        self._after_backward = after_backward

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._after_backward:
            self._change(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._after_backward:
            self._change(trainer)

    def _change(self, trainer: pl.Trainer) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-3 / (1 + trainer.global_step)


def test_a_learning_rate_that_changes_after_backward_is_that_of_the_exact_state() -> None:
    """Shown weights have the one before; the gradients of this model do not depend on them."""
    case = replace(CASE, model="LinearLossModule")
    runs = [run_here(case, callbacks=[ChangesRate(after_backward=after)]) for after in (False, True)]
    assert_same_state(*runs)


@pytest.mark.parametrize("strategy_options", [{"optimizer_in_backward": False}, {"publish_lag": 1}])
def test_a_learning_rate_that_a_hook_sets_is_used(strategy_options: dict[str, Any]) -> None:
    """Before backward, or after it where nothing is submitted in backward."""
    options = {
        "update_interval": 1,
        "publish_lag": 0,
        "worker_cores": 1,
        "weight_prediction": 0,
        "provisional_scale": 0,
    }

    def weights(*, after_backward: bool) -> list[Tensor]:
        model = SmallNet()
        strategy = ZenFlowStrategy(**{**options, **strategy_options})
        fit(model, strategy, steps=5, callbacks=[ChangesRate(after_backward=after_backward)])
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, weights(after_backward=False), weights(after_backward=True)))


class Interrupted(RuntimeError):
    """What ends a backward pass."""


class InterruptedNet(SmallNet):
    """Ends the backward pass of the fifth step with an error, when the last layers' gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution.register_full_backward_hook(self._interrupt)

    def _interrupt(self, module: nn.Module, *_: Any) -> None:
        if self.trainer.global_step == 4:
            raise Interrupted


class InvalidRate(pl.Callback):
    """Sets a learning rate that the step refuses, and takes it back before the checkpoint is saved."""

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if trainer.global_step == 4:
            self._set(optimizer, [math.nan] * len(self._rates))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._set(trainer.optimizers[0], self._rates)

    def _set(self, optimizer: Any, rates: list[float]) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def interrupted(tmp_path: Path, where: str, **keys: Any) -> None:
    strategy = ZenFlowStrategy(worker_cores=1, worker_timeout=250, **BUCKETS, **keys)
    saves = ModelCheckpoint(tmp_path, filename="last", save_on_exception=True, every_n_train_steps=10**6)
    if where == "backward":
        fit(InterruptedNet(), strategy, steps=8, callbacks=[saves], enable_checkpointing=True)
    fit(SmallNet(), strategy, steps=8, callbacks=[InvalidRate(), saves], enable_checkpointing=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"update_interval": 4, "publish_lag": 1},
        {"update_interval": 1, "publish_lag": 1},
        {"update_interval": 1, "publish_lag": 0, "optimizer_in_backward": False},
        {"update_interval": 1, "publish_lag": 0},
        {"update_interval": 2, "publish_lag": 0},
    ],
)
@pytest.mark.parametrize(("where", "error"), [("backward", Interrupted), ("step", ValueError)])
def test_an_interrupted_step_leaves_the_exact_state_of_the_step_before(
    where: str, error: type[Exception], tmp_path: Path, keys: dict[str, Any]
) -> None:
    with pytest.raises(error):
        interrupted(tmp_path, where, **keys)
    (saved,) = tmp_path.glob("*.ckpt")
    model = SmallNet()
    resumed = make_trainer(ZenFlowStrategy(worker_cores=1, **keys), max_steps=6)
    resumed.fit(model, ckpt_path=str(saved))
    assert resumed.global_step == 6
    whole = SmallNet()
    fit(whole, ZenFlowStrategy(worker_cores=1, **keys), steps=6)
    if keys["update_interval"] == 1 and keys["publish_lag"] == 0:
        assert all(map(torch.equal, model.parameters(), whole.parameters()))
