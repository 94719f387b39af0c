"""Decisions of `update_interval: auto` and `publish_lag: auto` on simulated time lines; multiples of momentum and gradients for "auto"."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from lightning_zenflow.core.schedule import (
    StaggeredSchedule,
    StalenessCompensation,
    UpdateSchedule,
    candidates_of,
    gradient_steps,
    momentum_steps,
    that_fit,
    with_changes,
)
from lightning_zenflow.offload.plan import LIKELY_HIDDEN, SMALL_STALL, SchedulePolicy, load_and_stall, relative_cost

INTERVALS, LAGS = [1, 2, 4, 8, 16], [0, 1]
N_BLOCKS = 16
BACKWARD = 0.6
"""Last part of a step, in which gradients are submitted where d = 0."""


def schedule_of(s: int, d: int) -> UpdateSchedule:
    return UpdateSchedule(update_interval=s, publish_lag=d)


Step = tuple[int, int, float]
"""S, d, and seconds of waiting."""


def run(
    load: Callable[[int], float],
    *,
    device_s: Callable[[int], float] = lambda step: 1.0,
    n_steps: int = 1500,
    intervals: list[int] = INTERVALS,
    lags: list[int] = LAGS,
    last: float = 0.0,
) -> list[Step]:
    """Trains in steps of one second. The worker executes one job after the other.

    Args:
        load: step -> seconds of the worker for one AdamW step of all blocks with a lag.
        device_s: step -> seconds of the device.
        last: share of the blocks whose gradients arrive at the very end of the step, such as those of an embedding.
    """
    auto = SchedulePolicy(candidates_of(intervals, lags))
    steps: list[Step] = []
    measured: list[tuple[float, float, float]] = []
    opened, in_flight = [0] * N_BLOCKS, deque[tuple[int, float, float]]()  # due step, seconds, end
    now = free = 0.0
    left_out, length = 2, 16
    for step in range(1, n_steps + 1):
        staggered = StaggeredSchedule(**asdict(auto.schedule), n_blocks=N_BLOCKS)
        s, d = auto.schedule.update_interval, auto.schedule.publish_lag
        now += device_s(step)
        closing = staggered.closing_blocks(step)
        for number, block in enumerate(closing, start=1):
            n = step - opened[block]
            arrived = min(1.0, number / (len(closing) * (1 - last)))
            cost = relative_cost(schedule_of(n, d)) * n / N_BLOCKS * load(step)
            free = max(now - (BACKWARD * device_s(step) * (1 - arrived) if d == 0 else 0.0), free) + cost
            in_flight.append((step + d, cost, free))
            opened[block] = step
        due = [job for job in in_flight if job[0] <= step]
        in_flight = deque(job for job in in_flight if job[0] > step)
        wait = max([end - now for _, _, end in due], default=0.0)
        now += max(0.0, wait)
        steps.append((s, d, max(0.0, wait)))
        left_out -= 1
        if left_out < 0:
            measured.append((device_s(step), sum(seconds for _, seconds, _ in due), max(0.0, wait)))
        if len(measured) == length:
            auto.observe(*load_and_stall(measured))
            left_out, length = 1 + max(s, auto.schedule.update_interval) + d, max(16, auto.schedule.update_interval)
            measured.clear()
    return steps


def stall_share(steps: list[Step]) -> float:
    waits = sum(wait for *_, wait in steps)
    return waits / (waits + len(steps))


def changes(steps: list[Step]) -> int:
    return sum(a[:2] != b[:2] for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("load", "options", "expected"),
    [
        (0.005, {}, (1, 0)),  # a very fast CPU
        (0.37, {}, (1, 0)),  # with the tentative gradient 0.43; the last of 16 blocks is not hidden: 2.7 %
        (0.35, {"last": 0.6}, (1, 1)),  # a lag hides what arrives last
        (0.8, {}, (1, 1)),
        (1.2, {}, (2, 1)),
        (2.0, {}, (4, 1)),
        (2.0, {"lags": [1]}, (4, 1)),
        (1.0, {"intervals": [3]}, (3, 1)),
        (3.8, {}, (16, 1)),
        # What cannot hide is the nearest to it.
        (9.0, {}, (16, 1)),
        (2.0, {"lags": [0]}, (16, 0)),
    ],
)
def test_it_settles_at_the_least_stale_schedule_that_hides(
    load: float, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    steps = run(lambda step: load, **options)
    assert {step[:2] for step in steps[-1000:]} == {expected}
    assert changes(steps) <= 2
    assert stall_share(steps[-1000:]) <= SMALL_STALL or load > 3.8 or options == {"lags": [0]}


def test_it_never_oscillates_whatever_the_speed() -> None:
    for load in [0.01 * 1.75**i for i in range(12)]:
        assert changes(run(lambda step, load=load: load, n_steps=1000)[500:]) == 0  # type: ignore[misc]


def test_a_cpu_that_is_slow_for_some_time() -> None:
    """Each time it is answered with a longer window, and its end with the first schedule."""
    steps = run(lambda step: 2.2 if step % 1000 > 500 else 0.8, n_steps=3000)
    for begin in range(0, 3000, 1000):
        assert {step[:2] for step in steps[begin + 200 : begin + 500]} == {(1, 1)}
        assert {step[:2] for step in steps[begin + 700 : begin + 1000]} == {(4, 1)}
    assert changes(steps) <= 12


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_jitter_of_both_sides(load: float) -> None:
    draw = random.Random(1)
    loads = [load * draw.lognormvariate(0, 0.3) for _ in range(4001)]
    times = [draw.lognormvariate(0, 0.1) for _ in range(4001)]
    steps = run(loads.__getitem__, device_s=times.__getitem__, n_steps=4000)
    assert stall_share(steps[1000:]) <= SMALL_STALL
    assert changes(steps[1000:]) <= 2


def test_times_of_steps_are_summed_up_without_the_slowest() -> None:
    steps = [(1.0, 0.5, 0.0), (1.0, 0.5, 0.25), (1.0, 0.5, 9.0), (4.0, 0.75, 0.0)]
    assert load_and_stall(steps) == (0.5, 0.25 / 6.25)


LEFT = 0.9 / relative_cost(schedule_of(1, 0))
"""The load at which S = 1, d = 0 was left, without its second gradient."""


@pytest.mark.parametrize(
    ("looks", "after"),
    [
        # A wait that the load does not explain, as beside processes that take the worker's cores or the trainer's.
        *(([(load, 0.5)] * 10, [(1, 0)] * 10) for load in (0.0, 0.04)),
        # Steps must wait in two looks in a row.
        ([(0.9, 0.3), (0.9, 0.05)] * 10, [(1, 0)] * 20),
        ([(0.9, 0.05), (0.9, 0.3), (0.9, 0.3)], [(1, 0), (1, 0), (1, 1)]),
        # A lag is not left for a longer window while the work hides.
        ([(0.9, 0.3), (0.9, 0.3), *[(0.7, 0.2)] * 3], [(1, 0), *[(1, 1)] * 4]),
        # It comes back when the load has halved; goes again where it has to, and then comes back at half of that load.
        ([(0.9, 0.3)] * 2 + [(0.51 * LEFT, 0.0), (0.49 * LEFT, 0.0)], [(1, 0), (1, 1), (1, 1), (1, 0)]),
        (
            [(0.9, 0.3)] * 2 + [(0.49 * LEFT, 0.0), (0.4, 0.1), (0.4, 0.1), (0.26, 0.0), (0.17, 0.0)],
            [(1, 0), (1, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 0)],
        ),
    ],
)
def test_looks_at_load_and_stall(looks: list[tuple[float, float]], after: list[tuple[int, int]]) -> None:
    """S and d behind each."""
    auto = SchedulePolicy(candidates_of(INTERVALS, LAGS))
    for (load, stall), expected in zip(looks, after, strict=True):
        before = auto.schedule
        assert (auto.observe(load, stall) is not None) == (auto.schedule != before)
        assert (auto.schedule.update_interval, auto.schedule.publish_lag) == expected


def test_the_less_stale_ones_are_kept_where_memory_is_short() -> None:
    def kept(n: int) -> list[tuple[int, int]]:
        """With room for `n` gradient slots."""

        def fits(schedules: Sequence[UpdateSchedule]) -> bool:
            staggered = (StaggeredSchedule(**asdict(s), n_blocks=16, in_backward=True) for s in with_changes(schedules))
            return max(s.n_slots for s in staggered) <= n

        return [(s.update_interval, s.publish_lag) for s in that_fit(candidates_of([1, 2, 4], [0, 1]), fits)]

    assert kept(1000) == [(1, 0), (2, 0), (1, 1), (2, 1), (4, 0), (4, 1)]
    assert (kept(19), kept(20), kept(32)) == ([], [(1, 0)], [(1, 0), (2, 0)])
    # Not S = 4, d = 0: a change from it to d = 1 would need the slots of S = 4, d = 1.
    assert kept(44) == [(1, 0), (2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize(("s", "d"), [*itertools.product([1, 2, 3, 8], [0, 1])])
@pytest.mark.parametrize("n_blocks", [24, 29])
def test_slots_are_as_many_as_are_needed(s: int, d: int, n_blocks: int) -> None:
    """Where every step has its gradients before its jobs: a job keeps its slots until the end of its due step."""
    schedule = StaggeredSchedule(update_interval=s, publish_lag=d, n_blocks=n_blocks)
    opened, in_flight, used = [0] * n_blocks, deque[tuple[int, int]](), 0
    for step in range(1, 6 * s + d):
        used = max(used, sum(step - begin for begin in opened) + sum(slots for _, slots in in_flight))
        for block in schedule.closing_blocks(step):
            in_flight.append((step + d, step - opened[block]))
            opened[block] = step
        while in_flight and in_flight[0][0] <= step:
            in_flight.popleft()
    assert used == schedule.n_slots if n_blocks % s == 0 else used <= schedule.n_slots < used + s * (s + 1 + 2 * d)


@pytest.mark.parametrize(("s", "d"), [(1, 1), (4, 0), (4, 1), (16, 1)])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_the_multiples_are_means_of_adamws_own(s: int, d: int, beta1: float) -> None:
    momentum: list[float] = []
    gradients: dict[int, list[float]] = {}
    # The number of gradients since the end of the window, at each forward pass that sees its weights.
    for n in range(d, d + s):
        # AdamW's momentum and step as multiples of m and g_1, ..., g_n.
        m, moved = np.eye(n + 1)[0], np.zeros(n + 1)
        for i in range(1, n + 1):
            m = beta1 * m + (1 - beta1) * np.eye(n + 1)[i]
            moved = moved + m
        momentum.append(moved[0])
        for i in range(1, n + 1):
            gradients.setdefault(i, []).append(moved[i])
    assert momentum_steps(schedule_of(s, d), beta1) == pytest.approx(np.mean(momentum))
    for age, multiples in gradients.items():
        assert gradient_steps(schedule_of(s, d), beta1, age) == pytest.approx(np.mean(multiples))


def test_ages_that_no_regular_pass_sees() -> None:
    schedule = schedule_of(4, 1)
    assert gradient_steps(schedule, 0.9, 100) == gradient_steps(schedule, 0.9, 4)
    assert gradient_steps(schedule_of(1, 0), 0.9, 1) == momentum_steps(schedule_of(1, 0), 0.9) == 0


def test_given_numbers_are_taken() -> None:
    given = StalenessCompensation(weight_prediction=2.5, provisional_scale=0.3)
    assert given.prediction_steps(schedule_of(4, 1), 0.9) == 2.5
    assert {given.scale(schedule_of(4, 1), 0.9, age) for age in (1, 2, 3)} == {0.3}


def test_the_device_takes_blocks_before_anything_becomes_late() -> None:
    """After one look, as many as let the rest hide; at the limit of its memory, and not before, the schedule becomes late."""
    auto = SchedulePolicy(candidates_of(INTERVALS, LAGS))
    immediate, waits = auto.schedule, (1.4, 0.3)
    assert auto.observe(*waits, room=0.9) is not None
    hides = 1 - LIKELY_HIDDEN * 0.55 / 1.4
    assert auto.schedule == immediate and auto.resident_share == pytest.approx(hides)
    assert auto.observe(0.45, 0.04, share=hides, room=0.9) is None and auto.resident_share == hides
    # It waits still: half of the rest.
    assert auto.observe(0.45, 0.1, share=hides, room=0.9) is not None
    assert auto.resident_share == pytest.approx((1 + hides) / 2)
    assert auto.observe(*waits, share=0.8, room=0.9) is not None and auto.resident_share == 0.9
    assert auto.observe(*waits, share=0.9, room=0.9) is None
    assert auto.observe(*waits, share=0.9, room=0.9) is not None
    assert auto.schedule > immediate and auto.resident_share == 0.9


@pytest.mark.parametrize("room", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("load", [0.3, 0.7, 1.4, 5.0])
def test_owners_do_not_swing(load: float, room: float) -> None:
    """A device whose share of the work leaves the worker's queue: the share only grows, and a few looks are the last to change anything."""
    auto, share, moves = SchedulePolicy(candidates_of([1], [0])), 0.0, []
    for look in range(40):
        seen = load * (1 - share)
        stall = max(0.0, seen - 0.55) / (1 + max(0.0, seen - 0.55))
        if auto.observe(seen, stall, share=share, room=room) is not None:
            assert share < auto.resident_share <= room
            share = auto.resident_share
            moves.append(look)
    assert len(moves) <= 3 and all(look < 4 for look in moves)
    assert load * (1 - share) <= 0.6 or share == room
