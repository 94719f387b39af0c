"""Weight prediction and provisional updates: where and how large they are, and that they never change what is exact, in models that are
harder than a stack of layers and where layers are frozen. Columns change owners while training goes on.
"""

import copy
import functools
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from callbacks import At
from direct_step import DirectStep, direct_step
from eventful_training import random_tensors
from harness import APPROXIMATE, AUTO, Case, Run, make_trainer, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.schedule import StalenessCompensation, UpdateSchedule
from lightning_zenflow.kernels.base import Kernels, SecondMoment
from models import SHAPES
from networks import TIED_NETS, SmallNet
from same_bits import assert_is_adamw, assert_same_tensors
from zenflow_reference import AdamWState, owned_elements


def case_of(name: str, **fields: Any) -> Case:
    fields = {"steps": 10, "topk_ratio": 0.2, "max_norm": 1.0, "loop": "direct", **fields}
    return Case(**{"model": "TiedNet", "model_options": TIED_NETS[name], "strategy_options": APPROXIMATE, **fields})


FROZEN_IN = {0: (4, 8), 1: (0, 6), 3: (2, 100), 4: (5, 6), 6: (3, 9)}
"""Matrices and a vector; parameters 2 and 5 are never frozen, 3 is to the end."""
ALL_BUT_ONE = dict.fromkeys((0, 1, 2, 3, 4, 6), (3, 6))
"""What is left is one element, so that of two ranks one has nothing at all to train for some steps."""
FREEZING = Case(
    model="LinearLossModule",
    model_options={"frozen_in": FROZEN_IN},
    steps=13,
    topk_ratio=0.3,
    max_norm=1.0,
    loop="direct",
).with_keys(**APPROXIMATE)
CASES = {
    "frozen layers, checkpointing": case_of("frozen layers, checkpointing"),
    "a layer used now and then, bf16": case_of("a layer used now and then", precision="bf16-true"),
    "freezing: S=1, d=1": replace(FREEZING, update_interval=1, publish_lag=1, flush_after=(5,)),
    "freezing: changes of schedule": replace(FREEZING, schedules=((3, 8, 1), (7, 1, 0), (9, 2, 1))).with_keys(**AUTO),
    "freezing: between micro-batches": replace(
        FREEZING, accumulate=3, model_options={"frozen_in": FROZEN_IN, "micro": 1}
    ),
    "freezing: nearly everything": replace(FREEZING, model_options={"frozen_in": ALL_BUT_ONE}),
    "freezing: layers in turn": case_of(
        "tied weights",
        accumulate=2,
        # Exact weights where layers are frozen and unfrozen, as a flush then leaves them: what is noted as shown is noted before it.
        flush_after=(2, 5, 7),
        # Unfrozen from the first one on, as in fine-tuning, and the last one frozen for good.
        model_options={"checkpoint": "non-reentrant", "frozen_in": {0: (0, 5), 1: (2, 7), 2: (5, 100)}},
    ),
    **{
        f"other columns in turn, S={s}, d={d}": Case(
            model="SmallNet", steps=14, topk_ratio=0.3, update_interval=s, publish_lag=d, loop="direct"
        ).with_keys(select_interval=select_interval)
        for s, d, select_interval in ((4, 1, 3), (2, 0, 1), (1, 1, 2))
    },
}
"""For test_equivalence and test_ranks. What is frozen in mid-run stays as it is, whatever momentum it had."""


PLAIN = Case(steps=10, topk_ratio=0.3, loop="direct")
"""Its gradients do not depend on the weights."""
UPDATED = PLAIN.with_keys(provisional_scale="auto")


def check_updated_entries(updated: Run, plain: Run, *, world_size: int) -> None:
    """Provisional updates show in host-owned entries of matrices and nowhere else."""
    oracle = PLAIN.make_oracle(world_size=world_size)
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


def test_the_second_moment_is_of_clipped_gradients() -> None:
    """Each step has the clip coefficient of the step before and its own loss scale."""
    beta2, generator = 0.99, torch.Generator().manual_seed(0)
    gradients = [torch.randn(12, 8, generator=generator) * (1 + step % 3) for step in range(6)]
    late = {"topk_ratio": 0, "update_interval": 4, "publish_lag": 1, "provisional_scale": "auto"}
    with direct_step([[torch.zeros(12, 8)]], max_norm=2.0, **late) as direct:
        for gradient in gradients:
            direct.loss_scale *= 2
            direct.backward([gradient])
            direct.step.step()
        assert direct.parts.provisional is not None
        state = direct.parts.provisional.state_dict()
    clips = [2.0 / (float(gradient.double().norm()) + 1e-6) for gradient in gradients]
    assert max(clips) < 0.5
    means = [torch.zeros(12, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)]
    for clip, gradient in zip(clips, gradients[1:], strict=False):
        squares = (clip * gradient).double().square()
        means = [beta2 * mean + (1 - beta2) * squares.mean(1 - i) for i, mean in enumerate(means)]
    (row, column, n) = state["second_moments"][0]
    torch.testing.assert_close([row.double(), column.double()], means, rtol=1e-4, atol=0)
    assert n == 5


@pytest.mark.parametrize(("s", "d", "scale"), [(4, 1, 0.5), (16, 1, "auto")])
def test_a_publish_undoes_no_later_update(s: int, d: int, scale: float | Literal["auto"]) -> None:
    """A weight has all updates since the step that it is exact for: the last d at least, and S - 1 more before its next publish.

    Each of them has the size that its place among them asks for.
    """
    # With S = 16 there are so many blocks that some end within a row.
    case = replace(PLAIN, steps=s + d + 5, topk_ratio=0, update_interval=s, publish_lag=d)
    still, moving = run_here(case), run_here(case.with_keys(provisional_scale=scale))
    prediction = StalenessCompensation(weight_prediction=0, provisional_scale=scale)
    schedule = UpdateSchedule(update_interval=s, publish_lag=d)
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
            scale_now = torch.tensor(1.0 if step else torch.nan)
            norms = Kernels().route(g, (), per_axis=True)
            factors = Kernels().factored_step_(moment, norms, beta2=h.beta2, lr=h.lr, scale=scale_now)
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


@functools.cache
def distance(s: int, d: int, weight_prediction: float | str, provisional_scale: float | str) -> float:
    """Of shown weights from AdamW's, root of the mean square over matrices and late steps."""
    case = replace(PLAIN, steps=18, topk_ratio=0, update_interval=s, publish_lag=d)
    run = run_here(case.with_keys(weight_prediction=weight_prediction, provisional_scale=provisional_scale))
    weights, gradients, groups = case.fixed_gradients()
    state, squares = AdamWState.start(weights, torch.float64), list[Tensor]()
    for step in range(case.steps):
        pairs = zip(run.shown[step], state.weights, strict=True)
        squares += [(a.double() - b).square().flatten() for a, b in pairs if step > 9 and b.dim() > 1]
        state.step(gradients[step], groups[step])
    return float(torch.cat(squares).mean().sqrt())


def test_shown_weights_are_near_adamws() -> None:
    s, d = 4, 1
    auto = distance(s, d, "auto", "auto")
    assert auto < 0.75 * distance(s, d, 0, 0)
    assert auto < 0.75 * distance(s, d, s + d - 1, 0.5)
    assert auto < distance(s, d, "auto", 0)


def test_columns_are_selected_and_released_with_the_lag() -> None:
    is_owned, shows_exact = list[bool](), list[bool]()

    def look(trainer: pl.Trainer) -> None:
        parts = optimizer_of(trainer).training.parts
        is_owned.append(len(parts.ownership.selections) > 0)
        shows_exact.append(parts.jobs.shows_exact)

    case = Case(steps=14, max_norm=1.0, topk_ratio=0.3, schedules=((3, 4, 1), (8, 1, 0), (12, 2, 0))).with_keys(**AUTO)
    assert_is_adamw(case, run_here(case, callbacks=[At("on_train_batch_end", look)]))
    # S and d change after steps 3, 8 and 12; the next step selects or releases.
    assert is_owned == [False] * 3 + [True] * 5 + [False] * 4 + [True] * 2
    assert shows_exact == [True] * 4 + [False] * 4 + [True] * 5 + [False]


def test_the_strategy_says_which_epoch_it_is() -> None:
    trainer = make_trainer(ZenFlowStrategy(update_interval=2, select_strategy="epoch", select_interval=2), max_epochs=5)
    trainer.fit(SmallNet(length=3))
    assert trainer.global_step == 15
    assert optimizer_of(trainer).training.parts.selector.state_dict()["next"] == 6  # after epochs 0, 2 and 4


def test_the_state_of_selected_columns_counts_as_copied() -> None:
    """In the step that selects, which publishes all weights as well."""
    with direct_step([random_tensors(50)], update_interval=4, publish_lag=1, topk_ratio=0.3) as direct:
        direct.backward(random_tensors(0))
        direct.step.step()
        numel, telemetry = sum(s.numel for s in direct.parts.rank.partition.slices), direct.parts.rank.telemetry
        owned = direct.parts.ownership.current
        assert owned is not None and telemetry.h2d_bytes == 4 * numel + 12 * owned.numel > 4 * numel


def state_of(direct: DirectStep) -> list[Tensor]:
    """Master weights, moments, and the weights that the model shows."""
    arena = direct.parts.rank.arena
    return [arena.master, arena.exp_avg.array, arena.exp_avg_sq.array, *direct.shown]


def test_a_change_of_columns_in_a_checkpoint_of_an_earlier_version() -> None:
    """Which changed them block by block: here the first block has still to follow. All follow at once."""
    options = {"update_interval": 4, "publish_lag": 1, "topk_ratio": 0.3}
    with (
        direct_step([random_tensors(50)], **options) as first,
        direct_step([random_tensors(51)], **options) as resumed,
    ):
        for step in range(3):
            first.backward(random_tensors(step))
            first.step.step()
        first.step.flush()
        for ours, theirs in zip(state_of(resumed), state_of(first), strict=True):
            ours.copy_(theirs)
        run = copy.deepcopy(first.step.state_dict())
        ownership = run["ownership"]
        ((number, columns),) = ownership["selections"].items()
        ownership["selections"] = {number: [None] * len(columns), number + 1: columns}
        ownership["of_block"] = [number] + [number + 1] * (len(ownership["of_block"]) - 1)
        ownership["wanted"] = [number + 1] * len(ownership["of_block"])
        run["planner"]["changing_until"] = 9
        assert resumed.step.load_state_dict(run, int(first.count), run["counts"]) == ""
        assert resumed.parts.ownership.selections.keys() == first.parts.ownership.selections.keys() != set()
        for direct in (first, resumed):
            for step in range(3, 6):
                direct.backward(random_tensors(step))
                direct.step.step()
        assert_same_tensors(resumed.shown, first.shown)
        first.step.flush()
        resumed.step.flush()
        assert_same_tensors(resumed.state(), first.state())
