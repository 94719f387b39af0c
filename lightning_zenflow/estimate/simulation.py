"""A run's time line without the run: what steps and jobs of given lengths lead to. Pure Python.

The trainer works for `device_s`, hands over what closes, waits for what is due; the worker does one round after the other. That is all of
the protocol (`jobs.JobQueue`) that takes time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightning_zenflow.schedule.auto_control import ScheduleObserver
from lightning_zenflow.schedule.auto_policy import Observation, SchedulePolicy, observation_step
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One optimizer step."""

    schedule: UpdateSchedule
    device_s: float
    """Seconds the device worked."""
    worker_s: float
    """Seconds the worker computed for the jobs that were published in this step."""
    stall_s: float
    """Seconds the trainer waited."""


def simulate(
    auto: SchedulePolicy,
    *,
    n_steps: int,
    n_blocks: int,
    device_s: Callable[[int], float],
    round_s: Callable[[int, int], float],
    max_interval_by_gradients: Callable[[int], float | None] = lambda step: None,
    early_share: float = 0.0,
    last_share: float = 0.0,
) -> list[SimulatedStep]:
    """Runs the schedule on given times.

    Args:
        auto: decides on the schedule.
        n_steps: how many steps.
        n_blocks: blocks of the partition.
        device_s: step -> seconds the device needs for it.
        round_s: (step, number of gradients) -> seconds the worker needs for one block's round that is handed over at the end of the step.
        max_interval_by_gradients: step -> what the gradient rule sees at its end.
        early_share: the last part of a step, in which its gradients arrive and, where S = 1, d = 0, go to the worker at once; 0: all at its
            end.
        last_share: share of the blocks whose gradients arrive together at the step's very end, as an embedding's.

    Returns:
        The steps, counted from 1.
    """
    steps: list[SimulatedStep] = []
    observer = ScheduleObserver(auto.schedule)
    observed: tuple[int, Observation] | None = None  # when it can be read without waiting, and what
    opened = [0] * n_blocks  # steps whose gradients the block's last round has taken
    in_flight: deque[tuple[int, float, float]] = deque()  # due step, seconds of work, time when done
    now = worker_free = 0.0
    for step in range(1, n_steps + 1):
        schedule = auto.schedule
        staggered = StaggeredSchedule(
            n_blocks=n_blocks, update_interval=schedule.update_interval, publish_lag=schedule.publish_lag
        )
        work = device_s(step)
        now += work
        closing = staggered.closing_blocks(step)
        early_s = early_share * work if (schedule.update_interval, schedule.publish_lag) == (1, 0) else 0.0
        for number, block in enumerate(closing, start=1):
            seconds = round_s(step, step - opened[block])
            arrived = min(1.0, number / (len(closing) * (1 - last_share)))
            worker_free = max(now - early_s * (1 - arrived), worker_free) + seconds
            in_flight.append((staggered.publish_step(step), seconds, worker_free))
            opened[block] = step
        due = [i for i, (due_step, _, _) in enumerate(in_flight) if due_step <= step]
        published = [in_flight.popleft() for _ in range(due[-1] + 1 if due else 0)]
        stall = max(0.0, published[-1][2] - now) if published else 0.0
        now += stall
        worker = sum(seconds for _, seconds, _ in published)
        steps.append(SimulatedStep(schedule=schedule, device_s=work, worker_s=worker, stall_s=stall))
        summary = observer.add(device_s=work, worker_s=worker, stall_s=stall)
        if summary is not None:
            load, share = summary
            observed = (
                observation_step(step, schedule),
                Observation(load=load, stall=share, max_interval_by_gradients=max_interval_by_gradients(step)),
            )
        if observed is not None and step == observed[0]:
            if auto.observe(observed[1]) is not None:
                observer.restart(schedule, auto.schedule)
            observed = None
    return steps
