"""Columns change owners while training goes on, and nothing is reset, dropped or applied twice."""

import functools
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

import random_selection
from harness import AUTO, EVERYTHING, Case, Run, fit, make_trainer, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.topk.selector import Selector
from networks import SmallNet
from reference import AdamWState
from same_bits import assert_same_run, assert_same_state, assert_same_tensors

STEPS = 14


def case_of(**options: Any) -> Case:
    return Case(**{"steps": STEPS, "max_norm": 1.0, "topk_ratio": 0.3, **options})


@functools.cache
def baseline() -> Run:
    return run_here(case_of(topk_ratio=0, update_interval=1, publish_lag=0))


@functools.cache
def exact_weights() -> list[list[Tensor]]:
    """[step][parameter]: AdamW's weights before the first step and after each one."""
    weights, gradients, groups = case_of().fixed_gradients()
    state = AdamWState.start(weights, torch.float64)
    history = [list(state.weights)]
    for of_step, groups_of_step in zip(gradients, groups, strict=True):
        state.step(of_step, groups_of_step, max_norm=1.0)
        history.append(list(state.weights))
    return history


class OwnedEntries(pl.Callback):
    """After each step, compares every device-owned entry with AdamW's weight of that very step."""

    def __init__(self) -> None:
        self.compared = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        optimizer = trainer.strategy.zenflow_optimizer
        assert optimizer is not None
        rank, ownership = optimizer.parts.rank, optimizer.parts.ownership
        partition = rank.partition
        exact = torch.zeros(partition.numel, dtype=torch.float64)
        for s in partition.slices:
            weights = exact_weights()[trainer.global_step][s.parameter]
            exact[s.begin : s.end] = weights.flatten()[s.start : s.start + s.numel]
        # Writing the owned entries over NaN shows which they are and what they hold.
        shown = torch.full((partition.numel,), torch.nan)
        before = [weights.clone() for weights in rank.weights]
        for weights in rank.weights:
            weights.fill_(torch.nan)
        ownership.write_weights()
        for begin, weights, old in zip(partition.group_begins, rank.weights, before, strict=True):
            shown[begin : begin + len(weights)] = weights
            weights.copy_(old)
        owned = ~torch.isnan(shown)
        assert int(owned.sum()) == ownership.numel
        self.compared += int(owned.sum())
        torch.testing.assert_close(shown[owned].double(), exact[owned], rtol=1e-6, atol=1e-6)


def check(case: Case) -> int:
    """Runs a case; returns how many entries of how many steps were compared."""
    owned = OwnedEntries()
    assert_same_state(run_here(case, callbacks=[owned]), baseline())
    return owned.compared


@pytest.mark.parametrize(
    ("update_interval", "publish_lag", "select_interval"),
    [(4, 1, 3), (2, 0, 1), (2, 3, 2), (3, 2, 5), (4, 0, 4), (1, 1, 1)],
)
def test_random_columns_in_turn(update_interval: int, publish_lag: int, select_interval: int) -> None:
    options = {"select_interval": select_interval, "select_strategy": "random_selection:choose"}
    case = case_of(update_interval=update_interval, publish_lag=publish_lag, strategy_options=options)
    assert check(case) > 0


class Owned(pl.Callback):
    """Notes after each step how many entries the device owns."""

    def __init__(self) -> None:
        self.numel: list[int] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        optimizer = trainer.strategy.zenflow_optimizer
        assert optimizer is not None
        self.numel.append(optimizer.parts.ownership.numel)


@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_is_selected_where_nothing_is_late(in_backward: bool) -> None:
    options = {"optimizer_in_backward": in_backward, "select_strategy": "random_selection:choose"}
    owned = Owned()
    case = case_of(update_interval=1, publish_lag=0, strategy_options=options)
    run = run_here(case, callbacks=[owned])
    assert owned.numel == [0] * STEPS
    assert_same_run(run, run_here(replace(case, topk_ratio=0)))


def test_columns_are_selected_and_released_with_the_lag() -> None:
    owned = Owned()
    case = case_of(schedules=((3, 4, 1), (8, 1, 0), (12, 2, 0)), strategy_options=AUTO)
    assert_same_state(run_here(case, callbacks=[owned]), baseline())
    is_owned = [numel > 0 for numel in owned.numel]
    # S and d change after steps 3, 8 and 12; the next step selects or releases, and blocks follow with their next windows.
    assert is_owned[:4] == [False] * 4 and all(is_owned[7:9])
    assert is_owned[10:12] == [False] * 2 and is_owned[-1]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(("update_interval", "publish_lag"), [(4, 1), (2, 3)])
def test_approximations_change_no_exact_bit_and_repeat(precision: str, update_interval: int, publish_lag: int) -> None:
    """All of them at once: another run shows the same weights, and the flush leaves AdamW's."""
    case = case_of(
        precision=precision, update_interval=update_interval, publish_lag=publish_lag, strategy_options=EVERYTHING
    )
    first, second = run_here(case), run_here(case)
    plain = run_here(case_of(precision=precision, topk_ratio=0, update_interval=1, publish_lag=0))
    assert_same_run(first, second)
    assert_same_state(first, plain)
    assert_same_tensors(first.weights, plain.weights)
    # They do move what the model shows.
    assert any(not torch.equal(a, b) for a, b in zip(first.shown[5], plain.shown[5], strict=True))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.integers(1, 7), st.integers(0, 4), st.integers(1, 6), st.integers(0, 3), st.sampled_from([0.05, 0.3, 1.0]))
def test_any_history(
    update_interval: int, publish_lag: int, select_interval: int, warm_up: int, topk_ratio: float
) -> None:
    options = {"select_interval": select_interval, "select_strategy": "random_selection:choose"}
    case = case_of(
        update_interval=update_interval,
        publish_lag=publish_lag,
        topk_ratio=topk_ratio,
        warm_up=warm_up,
        strategy_options=options,
        flush_after=(5, 6),
    )
    check(case)


def test_the_strategy_learns_what_it_needs() -> None:
    random_selection.CALLS.clear()
    run_here(case_of(strategy_options={"select_interval": 4, "select_strategy": "random_selection.choose"}))
    assert {c.step for c in random_selection.CALLS} == {1, 5, 9, 13}
    first = random_selection.CALLS[0]
    assert first.current.numel() == 0
    assert first.k >= 1
    assert first.parameter


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("random_selection:no_such_name", "cannot be imported"),
        ("no_such_module:choose", "cannot be imported"),
        ("random_selection:NOT_CALLABLE", "must be a callable"),
    ],
)
def test_a_strategy_that_cannot_be_used_is_refused(path: str, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(SmallNet(length=3), ZenFlowStrategy(select_strategy=path))


def test_a_strategy_that_returns_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="must return a 1-D int64 tensor of at most"):
        fit(SmallNet(length=3), ZenFlowStrategy(update_interval=4, select_strategy="random_selection:choose_too_many"))


def selector(interval: Any, strategy: str = "step", *, columns: int = 40) -> Selector:
    return Selector(["w"], [columns], topk_ratio=0.25, strategy=strategy, interval=interval, device=torch.device("cpu"))


def steps_measured(s: Selector, proxies: Any, steps: int) -> list[int]:
    """The steps in which a selector measures, fed with proxies(step)."""
    measured = []
    for step in range(1, steps + 1):
        if s.measures(step):
            measured.append(step)
            column_norms = s.new_column_norms()
            column_norms.flat.copy_(proxies(step))
            s.select(column_norms, step)
    return measured


def test_auto_asks_less_often_while_the_choice_fits() -> None:
    s = selector("auto")
    measured = steps_measured(s, lambda step: torch.arange(40.0), 400)
    assert measured == [1, 9, 25, 57, 121, 249]
    assert s.n_selections == 1


def test_auto_selects_anew_when_the_choice_no_longer_fits() -> None:
    s = selector("auto")
    measured = steps_measured(s, lambda step: torch.arange(40.0).roll(20 if step > 30 else 0), 90)
    assert s.n_selections == 2
    assert measured == [1, 9, 25, 57, 73]


def test_auto_asks_less_often_while_no_choice_fits_for_long() -> None:
    """Overlaps as recorded in a training of 25M parameters; then all columns stay."""
    s = selector("auto", columns=400)
    overlaps = iter([0.26, 0.38, 0.44, 0.45, 0.41, 0.40, 0.42, 1.0, 1.0])
    chosen = torch.arange(100)

    def proxies(step: int) -> Tensor:
        nonlocal chosen
        if step > 1:
            kept = round(100 * next(overlaps))
            others = torch.tensor(sorted(set(range(400)) - set(chosen.tolist())))
            chosen = torch.cat([chosen[:kept], others[: 100 - kept]])
        return torch.zeros(400).index_fill(0, chosen, 1.0)

    assert steps_measured(s, proxies, 900) == [1, 9, 17, 25, 33, 49, 81, 145, 273, 529]
    assert s.n_selections == 8
    assert s.last_overlap == 1.0


def test_a_step_that_is_not_finite_is_measured_again() -> None:
    s = selector(0)
    assert steps_measured(s, lambda step: torch.full((40,), torch.nan if step < 3 else 1.0), 6) == [1, 2, 3]
    assert s.n_selections == 1


def test_epochs_are_counted_by_the_trainer() -> None:
    s = selector(2, "epoch")
    measured = []
    for step in range(1, 13):
        s.start_epoch((step - 1) // 3)
        if s.measures(step):
            measured.append(step)
            s.select(s.new_column_norms(), step)
    assert measured == [1, 7]


def test_the_strategy_says_which_epoch_it_is() -> None:
    strategy = ZenFlowStrategy(update_interval=2, select_strategy="epoch", select_interval=2)
    trainer = make_trainer(strategy, max_epochs=5)
    trainer.fit(SmallNet(length=3))
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    optimizer = trainer.strategy.zenflow_optimizer
    assert optimizer is not None
    assert trainer.global_step == 15
    assert optimizer.parts.selector.n_selections == 3  # epochs 0, 2 and 4
