"""Decisions of `update_interval: auto` and `publish_lag: auto` on simulated time lines."""

import itertools
import random
from collections.abc import Callable

import pytest

from lightning_zenflow.schedule.auto_policy import (
    LARGEST_TAIL,
    Observation,
    SchedulePolicy,
    blocks_waited_for,
    largest_power_of_two,
    relative_cost,
)
from lightning_zenflow.schedule.candidates import candidates_of
from lightning_zenflow.schedule.staggered import UpdateSchedule
from schedule_simulation import SimulatedStep, simulate

INTERVALS = [1, 2, 4, 8, 16]
LAGS = [0, 1, 2]
N_BLOCKS = 16


def constant(seconds: float) -> Callable[[int], float]:
    return lambda step: seconds


def jobs(full_update_s: float, noise: Callable[[int], float] = lambda step: 1.0) -> Callable[[int, int], float]:
    """A worker that needs `full_update_s` for one AdamW step of all blocks."""
    return lambda step, n: full_update_s / N_BLOCKS * relative_cost(n) * n * noise(step)


def run(
    device_s: Callable[[int], float],
    round_s: Callable[[int, int], float],
    *,
    n_steps: int = 2000,
    intervals: list[int] = INTERVALS,
    lags: list[int] = LAGS,
    max_interval_by_gradients: Callable[[int], float | None] = lambda step: None,
    early_share: float = 0.0,
    last_share: float = 0.0,
    allows_tail: bool = False,
) -> list[SimulatedStep]:
    auto = SchedulePolicy(candidates_of(intervals, lags), hides_in_backward=early_share > 0, allows_tail=allows_tail)
    return simulate(
        auto,
        n_steps=n_steps,
        n_blocks=N_BLOCKS,
        device_s=device_s,
        # A job in backward applies one more gradient, tentatively.
        job_s=lambda step, n: round_s(step, n + (early_share > 0 and auto.schedule.publish_lag == 0)),
        max_interval_by_gradients=max_interval_by_gradients,
        early_share=early_share,
        last_share=last_share,
    )


def stall_share(steps: list[SimulatedStep]) -> float:
    return sum(s.stall_s for s in steps) / sum(s.stall_s + s.device_s for s in steps)


def changes(steps: list[SimulatedStep]) -> int:
    return sum(a.schedule != b.schedule for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("full_update_s", "expected"),
    [
        (0.005, (1, 0)),  # a very fast CPU: AdamW itself
        (0.05, (1, 1)),
        (0.7, (1, 1)),
        (1.2, (2, 1)),
        (2.0, (4, 1)),
        (2.7, (8, 1)),
        (3.8, (16, 1)),
        (9.0, (16, 1)),  # hopeless: the largest S stalls least
    ],
)
def test_settles_at_the_least_stale_schedule_that_hides(full_update_s: float, expected: tuple[int, int]) -> None:
    steps = run(constant(1.0), jobs(full_update_s))
    last = steps[-500:]
    assert {(s.schedule.update_interval, s.schedule.publish_lag) for s in last} == {expected}
    if full_update_s < 4:
        assert stall_share(last) <= 0.02
    assert changes(steps) <= 3


@pytest.mark.parametrize(
    ("full_update_s", "expected"),
    [
        (0.05, (1, 0)),
        (0.24, (1, 0)),  # with the tentative gradient 0.28; the last of 16 blocks is not hidden: 1.75 %
        (0.6, (1, 1)),
        (0.8, (1, 1)),
        (2.0, (4, 1)),
    ],
)
def test_adamw_itself_wherever_it_hides_behind_backward(full_update_s: float, expected: tuple[int, int]) -> None:
    steps = run(constant(1.0), jobs(full_update_s), early_share=0.6)
    last = steps[-500:]
    assert {(s.schedule.update_interval, s.schedule.publish_lag) for s in last} == {expected}
    assert stall_share(last) <= 0.02


def test_the_tentative_gradient_is_not_expected_where_there_is_a_lag() -> None:
    """S = 8 with a lag takes 0.163 / 0.7 of S = 1, d = 0: with S = 16, memory would be needed and set aside for a longer window."""
    steps = run(constant(1.0), jobs(2.7), early_share=0.6)
    visited = [s.schedule for s in steps if s.schedule.update_interval > 1]
    assert set(visited) == {UpdateSchedule(update_interval=8, publish_lag=1)}


@pytest.mark.parametrize("allows_tail", [False, True])
def test_what_arrives_last_gets_a_lag_of_its_own(allows_tail: bool) -> None:
    """An embedding of 15 % of the weights is 2.4 of 16 blocks. Without a tail all weights would have to be late."""
    steps = run(constant(1.0), jobs(0.35), early_share=0.6, last_share=0.15, allows_tail=allows_tail, lags=[0, 1])
    last = steps[-20:]
    expected = (0, 3 / N_BLOCKS) if allows_tail else (1, 0.0)
    assert {(s.schedule.update_interval, s.schedule.publish_lag, s.tail) for s in last} == {(1, *expected)}
    assert stall_share(last) <= 0.02
    assert not allows_tail or changes(steps) == 0


def test_a_tail_is_never_most_of_the_weights() -> None:
    steps = run(constant(1.0), jobs(0.35), early_share=0.6, last_share=0.6, allows_tail=True)
    assert max(s.tail for s in steps) <= LARGEST_TAIL
    assert stall_share(steps[-20:]) <= 0.02


@pytest.mark.parametrize(
    ("load", "stall", "update_interval", "expected"),
    [
        (0.5, 0.01, 1, 0),  # tolerated
        (0.5, 0.5 / 16 / (1 + 0.5 / 16), 1, 1),  # one block's update
        (0.5, 1.2 * 0.5 / 16 / (1 + 1.2 * 0.5 / 16), 1, 1),  # and a little of the next one's
        (0.5, 1.5 * 0.5 / 16 / (1 + 1.5 * 0.5 / 16), 1, 2),
        (0.5, 0.5 / 4 / (1 + 0.5 / 4), 4, 4),  # one in each phase
        (0.5, 0.5, 1, 16),  # more than all of them
        (0.0, 0.5, 1, 0),
    ],
)
def test_blocks_waited_for(load: float, stall: float, update_interval: int, expected: int) -> None:
    assert blocks_waited_for(load, stall, n_blocks=16, update_interval=update_interval) == expected


def test_a_schedule_that_nearly_hides_behind_backward_is_tried_less_and_less_often() -> None:
    """Small enough to look hidden, but for the last block: a stall of 2.3 %."""
    steps = run(constant(1.0), jobs(0.37), early_share=0.6, n_steps=20_000)
    late = steps[10_000:]
    assert stall_share(late) < 0.002
    assert changes(late) <= 20


@pytest.mark.parametrize("early_share", [0.0, 0.6])
@pytest.mark.parametrize("full_update_s", [0.01 * 1.75**i for i in range(12)])
def test_never_oscillates_whatever_the_speed(full_update_s: float, early_share: float) -> None:
    steps = run(constant(1.0), jobs(full_update_s), n_steps=4000, early_share=early_share)
    looks_hidden = full_update_s * relative_cost(2, tentative=True) < 0.4
    tries_in_backward = (
        early_share > 0 and looks_hidden and full_update_s * relative_cost(1, tentative=True) > 0.02 * N_BLOCKS
    )
    assert changes(steps[1000:]) <= (20 if tries_in_backward else 0)


def test_a_cpu_that_becomes_slow_is_answered_at_once_and_one_that_recovers_after_a_while() -> None:
    slow = range(1000, 2000)
    steps = run(constant(1.0), jobs(0.6, lambda step: 4.0 if step in slow else 1.0), n_steps=4000)
    assert steps[990].schedule == UpdateSchedule(update_interval=1, publish_lag=1)
    assert steps[1060].schedule.update_interval >= 4
    assert stall_share(steps[1060:1990]) <= 0.02
    assert steps[-1].schedule == UpdateSchedule(update_interval=1, publish_lag=1)
    assert changes(steps) <= 6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("full_update_s", [0.5, 1.0, 2.0])
def test_jitter_of_both_sides(seed: int, full_update_s: float) -> None:
    device, worker = random.Random(seed), random.Random(seed + 100)
    factors = [worker.lognormvariate(0, 0.3) for _ in range(8001)]
    times = [device.lognormvariate(0, 0.1) for _ in range(8001)]
    steps = run(lambda step: times[step], jobs(full_update_s, lambda step: factors[step]), n_steps=8000)
    assert stall_share(steps[2000:]) <= 0.03
    assert changes(steps[2000:]) <= 12


def test_single_slow_steps_of_the_trainer_change_nothing() -> None:
    steps = run(lambda step: 20.0 if step % 50 == 0 else 1.0, jobs(1.2))
    assert {s.schedule for s in steps[-1000:]} == {UpdateSchedule(update_interval=2, publish_lag=1)}


def test_rare_hiccups_of_the_worker_change_nothing() -> None:
    steps = run(constant(1.0), jobs(0.6, lambda step: 12.0 if step % 400 == 0 else 1.0), n_steps=4000)
    assert steps[-1].schedule.update_interval == 1
    assert stall_share(steps[200:]) <= 0.02


def test_without_lag_to_choose_from_the_interval_alone_is_adapted() -> None:
    steps = run(constant(1.0), jobs(2.0), lags=[1])
    assert steps[-1].schedule == UpdateSchedule(update_interval=4, publish_lag=1)
    steps = run(constant(1.0), jobs(2.0), lags=[0])
    assert steps[-1].schedule == UpdateSchedule(update_interval=16, publish_lag=0), "nothing hides, so the cheapest"


def test_with_a_fixed_interval_the_lag_alone_is_adapted() -> None:
    assert run(constant(1.0), jobs(0.001), intervals=[3])[-1].schedule == UpdateSchedule(
        update_interval=3, publish_lag=0
    )
    assert run(constant(1.0), jobs(1.0), intervals=[3])[-1].schedule == UpdateSchedule(update_interval=3, publish_lag=1)
    spiky = jobs(1.0, lambda step: 3.0 if step % 4 == 0 else 0.5)
    assert run(constant(1.0), spiky, intervals=[3])[-1].schedule == UpdateSchedule(update_interval=3, publish_lag=2)


def test_the_gradient_rule_bounds_the_interval_and_noise_does_not_move_it() -> None:
    noise = random.Random(1)
    steps = run(constant(1.0), jobs(9.0), max_interval_by_gradients=lambda step: 8 + noise.uniform(-1, 1))
    assert {s.schedule.update_interval for s in steps[-1000:]} == {8}
    assert changes(steps[200:]) == 0


def test_the_gradient_rule_never_asks_for_less_than_four_steps() -> None:
    assert run(constant(1.0), jobs(9.0), max_interval_by_gradients=lambda step: 1.0)[-1].schedule.update_interval == 4


def test_the_gradient_rule_follows_training() -> None:
    steps = run(constant(1.0), jobs(9.0), max_interval_by_gradients=lambda step: 20.0 if step < 1000 else 5.0)
    assert steps[900].schedule.update_interval == 16
    assert steps[-1].schedule.update_interval == 4


def test_coming_back_takes_longer_each_time_it_fails() -> None:
    """A CPU that is fast for some time again and again: the pauses between attempts grow."""
    auto = SchedulePolicy(candidates_of(INTERVALS, [1]))
    attempts = []
    for i in range(3000):
        fast = auto.schedule.update_interval > 1
        decision = auto.observe(Observation(load=0.2 if fast else 1.5, stall=0.0))
        if decision is not None and decision.schedule.update_interval == 1:
            attempts.append(i)
    pauses = [b - a for a, b in itertools.pairwise(attempts)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 60


@pytest.mark.parametrize(
    ("limit", "expected"), [(0.5, 1), (1, 1), (1.9, 1), (2, 2), (7.99, 4), (8, 8), (16, 16), (100, 64)]
)
def test_largest_power_of_two(limit: float, expected: int) -> None:
    assert largest_power_of_two(limit) == expected


@pytest.mark.parametrize(
    ("intervals", "lags", "hides_in_backward", "expected"),
    [
        (INTERVALS, LAGS, True, (1, 0)),
        (INTERVALS, LAGS, False, (1, 1)),
        ([8], LAGS, True, (8, 0)),
        (INTERVALS, [0], False, (1, 0)),
        ([1], [3], True, (1, 3)),
    ],
)
def test_it_starts_with_the_least_stale_that_may_hide(
    intervals: list[int], lags: list[int], hides_in_backward: bool, expected: tuple[int, int]
) -> None:
    schedule = SchedulePolicy(candidates_of(intervals, lags), hides_in_backward=hides_in_backward).schedule
    assert (schedule.update_interval, schedule.publish_lag) == expected
