"""Provisional updates and weight prediction in models that are harder than a stack of layers: they never change what is exact.

Gradients are computed again, in plain torch and without checkpointing, at the weights that the run showed in each step; AdamW on that
sequence is what a flush must leave.
"""

import functools
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from harness import APPROXIMATE, AUTO, RESELECTING, Case, Run, fit, run_here
from lightning_zenflow.kernels.factored import SecondMoment, factored_step_
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.schedule.staggered import UpdateSchedule
from models import SHAPES, FreezingModule
from networks import SmallNet
from rank_processes import run_on_ranks
from reference import AdamWState, Group, factored_second_moment, owned_elements
from same_bits import assert_close_to_adamw, assert_same_state, assert_same_tensors

STEPS = 10
MODELS: dict[str, dict[str, Any]] = {
    "tied weights": {},
    "non-reentrant checkpointing": {"checkpoint": "non-reentrant"},
    "reentrant checkpointing": {"checkpoint": "reentrant"},
    "tied weights, once in a checkpoint": {"checkpoint": "non-reentrant", "head_in_checkpoint": True},
    "a layer used twice": {"checkpoint": "non-reentrant", "shared": True},
    "frozen layers": {"frozen": (0, 2)},
    "frozen layers, checkpointing": {"checkpoint": "non-reentrant", "frozen": (1,)},
    "a layer used now and then": {"used_every": 3},
    "a layer never used": {"used_every": 0},
}


def case_of(name: str, *, precision: str = "32-true", **options: Any) -> Case:
    return Case(
        **{
            "model": "TiedNet",
            "model_options": MODELS[name],
            "steps": STEPS,
            "precision": precision,
            "topk_ratio": 0.2,
            "max_norm": 1.0,
            "strategy_options": APPROXIMATE,
            **options,
        }
    )


def without_checkpointing(case: Case) -> Case:
    return replace(case, model_options={**case.model_options, "checkpoint": ""})


def step_without(
    state: AdamWState, frozen: list[int], gradients: list[Tensor], groups: list[Group], max_norm: float | None
) -> None:
    """A step of AdamW that does not see the parameters with these numbers."""
    kinds = (state.weights, state.exp_avg, state.exp_avg_sq)
    before = [list(kind) for kind in kinds]
    gradients = [torch.zeros_like(g) if i in frozen else g for i, g in enumerate(gradients)]
    state.step(gradients, groups, max_norm=max_norm or 0.0)
    for i in frozen:
        for kind, old in zip(kinds, before, strict=True):
            kind[i] = old[i]


def check(case: Case, runs: list[Run]) -> None:
    """Compares the end of a run with AdamW on its own gradients. `runs` has one entry a rank."""
    oracle = without_checkpointing(case).make_reference(world_size=len(runs))
    state = AdamWState.start(oracle.parameters, torch.float64)
    for step in range(case.steps):
        for run in runs[1:]:
            assert_same_tensors(run.shown[step], runs[0].shown[step])
        oracle.follow(runs[0].shown[step])
        oracle.steps = step
        losses, gradients = oracle.gradients()
        for micro, of_ranks in enumerate(losses):
            for run, loss in zip(runs, of_ranks, strict=True):
                assert run.losses[step][micro] == pytest.approx(loss, abs=1e-6)
        groups = [
            h
            for h, parameters in zip(case.optimizer.groups(step), oracle.parameter_groups, strict=True)
            for _ in parameters
        ]
        frozen = oracle.module.frozen_at(step)
        step_without(
            state, [i for i, p in enumerate(oracle.parameters) if p in frozen], gradients, groups, case.max_norm
        )
    ours = runs[0]
    assert_close_to_adamw(ours, state, atol=2e-6)
    for run in runs:
        assert_same_tensors(run.weights, [w.to(case.dtype) for w in ours.master])


FROZEN_IN = {0: (4, 8), 1: (0, 6), 3: (2, 100), 4: (5, 6), 6: (3, 9)}
"""Matrices and a vector; parameters 2 and 5 are never frozen, 3 is to the end."""
ALL_BUT_ONE = dict.fromkeys((0, 1, 2, 3, 4, 6), (3, 6))
"""What is left is one element, so that of two ranks one has nothing at all to train for some steps."""
IN_GROUPS = sorted(range(len(SHAPES)), key=lambda i: len(SHAPES[i]) < 2)
"""Numbers of `FreezingModule`'s parameters in the order of the parameter groups: matrices first."""
FREEZING = Case(model="FreezingModule", model_options={"frozen_in": FROZEN_IN}, steps=13, topk_ratio=0.3, max_norm=1.0)
FREEZING_CASES = {
    "everything on the host, nothing late": replace(FREEZING, topk_ratio=0, update_interval=1, publish_lag=0),
    "defaults": replace(FREEZING, strategy_options=APPROXIMATE),
    "long lag": replace(FREEZING, update_interval=2, publish_lag=3, flush_after=(5,), strategy_options=APPROXIMATE),
    "warm-up, reselection": replace(FREEZING, warm_up=3, strategy_options=RESELECTING),
    "everything on the device": replace(FREEZING, topk_ratio=1),
    "changes of schedule": replace(
        FREEZING,
        schedules=((3, 8, 1), (7, 1, 0), (9, 2, 2)),
        strategy_options={**APPROXIMATE, **AUTO},
    ),
}


@functools.cache
def exact_freezing() -> Run:
    return run_here(FREEZING_CASES["everything on the host, nothing late"])


NEARLY_ALL_FROZEN = replace(FREEZING_CASES["defaults"], model_options={"frozen_in": ALL_BUT_ONE})


def check_freezing(case: Case, runs: list[Run]) -> None:
    """As `check`, for fixed gradients; frozen weights and their moments keep their bits, whatever momentum they had."""
    model = case.make_model()
    assert isinstance(model, FreezingModule)
    weights, gradients, groups = case.fixed_gradients(world_size=len(runs))
    state = AdamWState.start(weights, torch.float64)
    for step in range(case.steps):
        frozen = [i for i, number in enumerate(IN_GROUPS) if model.is_left_alone(number, step)]
        step_without(state, frozen, gradients[step], groups[step], case.max_norm)
    assert_close_to_adamw(runs[0], state)
    check_what_is_shown(case, runs)


def check_what_is_shown(case: Case, runs: list[Run]) -> None:
    model = case.make_model()
    assert isinstance(model, FreezingModule)
    for run in runs:
        assert all(torch.equal(w, m.to(w.dtype)) for w, m in zip(run.weights, runs[0].master, strict=True))
        for i, number in enumerate(IN_GROUPS):
            for step in range(1, case.steps - 1):
                # What is shown in the first frozen step is noted before it is frozen.
                if model.is_left_alone(number, step - 1) and model.is_left_alone(number, step):
                    assert torch.equal(run.shown[step + 1][i], run.shown[step][i])
        for step in range(case.steps):
            assert_same_tensors(run.shown[step], runs[0].shown[step])


LAYERS_IN_TURN = case_of(
    "non-reentrant checkpointing",
    accumulate=2,
    # Exact weights where layers are frozen and unfrozen, as a flush then leaves them: what is noted as shown is noted before it.
    flush_after=(2, 5, 7),
    model_options={"checkpoint": "non-reentrant", "frozen_in": {0: (0, 5), 1: (2, 7), 2: (5, 100)}},
)
"""Unfrozen from the first one on, as in fine-tuning, and the last one frozen for good."""

TWO_RANKS = {
    "layers in turn": LAYERS_IN_TURN,
    **{f"{name}, bf16": case_of(name, precision="bf16-true") for name in ("tied weights", "a layer used now and then")},
    **{name: case_of(name) for name in ("frozen layers, checkpointing", "reentrant checkpointing")},
}
PLAIN = Case(steps=STEPS, topk_ratio=0.3)
"""Its gradients do not depend on the weights."""


@functools.cache
def on_two_ranks() -> dict[str, list[Run]]:
    freezing = {f"freezing, {name}": case for name, case in FREEZING_CASES.items()}
    updates = {"updated": replace(PLAIN, strategy_options={"provisional_scale": "auto"}), "plain": PLAIN}
    return run_on_ranks({**TWO_RANKS, **freezing, **updates, "nearly all frozen": NEARLY_ALL_FROZEN})


def check_updated_entries(updated: Run, plain: Run, *, world_size: int) -> None:
    """Provisional updates show in host-owned entries of matrices and nowhere else."""
    oracle = PLAIN.make_reference(world_size=world_size)
    _, first = oracle.gradients()
    owned = [owned_elements(g, PLAIN.topk_ratio) for g in first]
    differs = [torch.zeros_like(mask) for mask in owned]
    for ours, theirs in zip(updated.shown, plain.shown, strict=True):
        for d, a, b in zip(differs, ours, theirs, strict=True):
            d |= a != b
    for i, (d, mask) in enumerate(zip(differs, owned, strict=True)):
        assert not (d & mask).any(), f"parameter {i}"
        assert d.dim() > 1 or not d.any()
        if d.dim() > 1:
            # All but the rows that a partition cuts, one on each side of it.
            assert (d | mask).flatten(1).all(1).sum() >= d.shape[0] - world_size
    assert_same_tensors(updated.master, plain.master)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_flush_leaves_adamw_on_the_runs_own_gradients(name: str, precision: str) -> None:
    case = case_of(name, precision=precision)
    check(case, [run_here(case)])


@pytest.mark.parametrize("name", ["non-reentrant checkpointing", "frozen layers, checkpointing"])
def test_small_buckets_that_are_reduced_in_mid_backward(name: str) -> None:
    """The late layers' weights are then updated while the early ones' activations are still to be computed again."""
    case = case_of(
        name, accumulate=2, strategy_options={**APPROXIMATE, "reduce_bucket_size": 50, "allgather_bucket_size": 100}
    )
    check(case, [run_here(case)])


def test_a_gradient_that_comes_in_two_parts_is_refused() -> None:
    """By DeepSpeed, with the stock optimizer as well: reentrant checkpointing computes a shared weight's gradient once for each use."""
    case = replace(case_of("a layer used twice"), model_options={"checkpoint": "reentrant", "shared": True})
    with pytest.raises(AssertionError, match="Multiple gradient reduction is currently not supported"):
        run_here(case)


def test_it_updates_host_owned_matrices_only() -> None:
    check_updated_entries(
        run_here(replace(PLAIN, strategy_options={"provisional_scale": "auto"})), run_here(PLAIN), world_size=1
    )


def test_it_updates_matrices_of_two_rows() -> None:
    """The fewest that it updates."""
    case = Case(steps=8, topk_ratio=0, model_options={"shapes": ((2, 40), (31, 29), (5,))})
    still, moving = run_here(case), run_here(case.with_keys(provisional_scale="auto"))
    for i, weight in enumerate(still.weights):
        differs = torch.stack([ours[i] != theirs[i] for ours, theirs in zip(moving.shown, still.shown, strict=True)])
        assert bool(differs.any(0).all()) == (weight.dim() > 1)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_the_flush_leaves_adamw_on_two_ranks(name: str) -> None:
    check(TWO_RANKS[name], on_two_ranks()[name])


def test_it_updates_host_owned_matrices_only_on_two_ranks() -> None:
    for updated, plain in zip(on_two_ranks()["updated"], on_two_ranks()["plain"], strict=True):
        check_updated_entries(updated, plain, world_size=2)


@pytest.mark.parametrize("name", FREEZING_CASES)
def test_what_is_frozen_in_mid_run_stays_as_it_is(name: str) -> None:
    run = run_here(FREEZING_CASES[name])
    check_freezing(FREEZING_CASES[name], [run])
    assert_same_state(run, exact_freezing())


@pytest.mark.parametrize("name", FREEZING_CASES)
def test_what_is_frozen_in_mid_run_stays_as_it_is_on_two_ranks(name: str) -> None:
    check_freezing(FREEZING_CASES[name], on_two_ranks()[f"freezing, {name}"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_layers_frozen_in_turn(precision: str) -> None:
    case = replace(LAYERS_IN_TURN, precision=precision)
    check(case, [run_here(case)])


def test_freezing_with_accumulation_and_bf16() -> None:
    case = replace(FREEZING_CASES["defaults"], accumulate=3, precision="bf16-true")
    check_freezing(case, [run_here(case)])


def test_frozen_and_unfrozen_between_micro_batches() -> None:
    options = {"frozen_in": FROZEN_IN, "micro": 1}
    case = replace(FREEZING_CASES["defaults"], accumulate=3, model_options=options)
    check_freezing(case, [run_here(case)])


def test_nearly_everything_frozen() -> None:
    check_freezing(NEARLY_ALL_FROZEN, [run_here(NEARLY_ALL_FROZEN)])


def test_nothing_to_train_on_one_of_two_ranks() -> None:
    check_freezing(NEARLY_ALL_FROZEN, on_two_ranks()["nearly all frozen"])


class Unfreeze(pl.Callback):
    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, SmallNet)
        pl_module.hidden.weight.requires_grad_(trainer.current_epoch == 1)


def test_what_was_frozen_at_setup_cannot_be_unfrozen() -> None:
    model = SmallNet(length=2)
    model.hidden.weight.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"hidden.weight.requires_grad must be False, got True"):
        fit(model, steps=5, callbacks=[Unfreeze()])


@pytest.mark.usefixtures("fp16_on_the_cpu")
@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_the_second_moment_is_of_clipped_gradients(precision: str) -> None:
    """Each step has the clip coefficient of the step before and its own loss scale, which doubles in each step in fp16."""
    growing = {"initial_scale_power": 2, "loss_scale_window": 1}
    case = Case(topk_ratio=0, steps=6, max_norm=2.0, precision=precision).with_keys(provisional_scale="auto", **growing)
    strategy = case.make_strategy()
    run = run_here(case, strategy=strategy)
    optimizer = strategy.zenflow_optimizer
    assert optimizer is not None
    assert run.skipped == 0 and optimizer.cur_scale == (1 if precision == "32-true" else 2.0**7)
    state = optimizer.parts.provisional.state_dict()
    assert state is not None
    _, gradients, groups = case.fixed_gradients()
    norms = [torch.stack([g.double().square().sum() for g in of_step]).sum().sqrt() for of_step in gradients]
    clips = [1 / max(1.0, norm.item() / 2.0) for norm in norms]
    assert max(clips) < 0.5
    for i, (first, moment) in enumerate(zip(gradients[0], state["second_moments"], strict=True)):
        # The last matrix has no gradient in some steps, which are left out.
        if first.dim() < 2 or tuple(first.shape) == SHAPES[-1]:
            continue
        clipped = [clip * of_step[i].flatten(1).double() for clip, of_step in zip(clips, gradients[1:], strict=False)]
        row, column, n = moment
        torch.testing.assert_close(
            (row.double(), column.double()),
            factored_second_moment(clipped, beta2=groups[0][i].beta2),
            rtol=1e-4,
            atol=0,
        )
        assert n == case.steps - 1


@pytest.mark.parametrize(
    ("s", "d", "scale"),
    [(1, 1, "auto"), (1, 2, "auto"), (2, 1, "auto"), (4, 1, "auto"), (4, 1, 0.5), (2, 2, "auto"), (16, 1, "auto")],
)
def test_a_publish_undoes_no_later_update(s: int, d: int, scale: float | Literal["auto"]) -> None:
    """A weight has all updates since the step that it is exact for: the last d at least, and S - 1 more before its next publish.

    Each of them has the size that its place among them asks for.
    """
    # With S = 16 there are so many blocks that some end within a row.
    case = Case(steps=s + d + 5, topk_ratio=0, update_interval=s, publish_lag=d)
    still = run_here(case)
    moving = run_here(replace(case, strategy_options={"provisional_scale": scale}))
    prediction, schedule = (
        StalenessCompensation(weight_prediction=0, provisional_scale=scale),
        UpdateSchedule(update_interval=s, publish_lag=d),
    )
    _, gradients, groups = case.fixed_gradients()
    counts: set[int] = set()
    for i, gradient in enumerate(gradients[0]):
        # The last matrix has no gradient in some steps, and then no update.
        if gradient.dim() < 2 or tuple(gradient.shape) == SHAPES[-1]:
            continue
        shape = (len(gradient), gradient[0].numel())
        moment, updates = SecondMoment.zeros(*shape, torch.device("cpu")), [torch.zeros(shape)]
        for step in range(case.steps - 1):
            g, h = gradients[step][i].view(shape), groups[step][i]
            # The first step has none: the clip coefficient of a step before it is not known.
            factors = factored_step_(
                moment,
                g.square().sum(1),
                g.square().sum(0),
                beta2=h.beta2,
                lr=h.lr,
                scale=torch.tensor(1.0 if step else torch.nan),
            )
            updates.append(torch.where(factors.finite, g * factors.row_scale * -factors.col_scale, 0.0))
            if step < s + d:
                continue
            found = (moving.shown[step + 1][i] - still.shown[step + 1][i]).view(shape)
            sizes = [prediction.scale(schedule, h.beta1, age) for age in range(1, d + s)]
            expected = [
                sum(size * update for size, update in zip(sizes, updates[-n:], strict=False)) for n in range(d, d + s)
            ]
            close = [torch.isclose(found, torch.as_tensor(e), rtol=1e-3, atol=1e-6) for e in expected]
            assert torch.stack(close).any(0).all()
            counts |= {n for n, entries in enumerate(close, d) if entries.any()}
    assert counts == set(range(d, d + s))
