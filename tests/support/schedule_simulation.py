"""Simulation of a run's schedule from the durations of steps and jobs. Pure Python.

In each step the trainer works for `device_s`, submits the jobs that close and waits for those that are due. The worker executes one
job after the other. That is the part of the protocol (`deferred.jobs`) that takes time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightning_zenflow.schedule.auto_control import ScheduleObserver
from lightning_zenflow.schedule.auto_policy import Observation, SchedulePolicy, blocks_waited_for, observation_step
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One optimizer step, in seconds."""

    schedule: UpdateSchedule
    tail: float
    """Share of the blocks that take a lag of one step of their own."""
    device_s: float
    """Work of the device."""
    worker_s: float
    """Computation of the worker for the jobs published in this step."""
    stall_s: float
    """Wait of the trainer."""


def simulate(
    auto: SchedulePolicy,
    *,
    n_steps: int,
    n_blocks: int,
    device_s: Callable[[int], float],
    job_s: Callable[[int, int], float],
    max_interval_by_gradients: Callable[[int], float | None] = lambda step: None,
    early_share: float = 0.0,
    last_share: float = 0.0,
) -> list[SimulatedStep]:
    """Simulates the schedule with given durations.

    Args:
        auto: decides on the schedule.
        n_steps: number of steps.
        n_blocks: blocks of the partition.
        device_s: step -> seconds of work of the device.
        job_s: (step, number of gradients) -> seconds of computation of the worker for one job submitted at the end of the step.
        max_interval_by_gradients: step -> bound of S by the gradient rule at its end.
        early_share: last part of a step, in which gradients arrive and are submitted where d = 0; 0: all are submitted at its end.
        last_share: share of the blocks whose gradients arrive at the very end of the step, such as those of an embedding.

    Returns:
        The steps, counted from 1.
    """
    steps: list[SimulatedStep] = []
    observer = ScheduleObserver(auto.schedule)
    observed: tuple[int, Observation] | None = None  # the step at which it is read, and the observation
    opened = [0] * n_blocks  # last step of each block's last job
    in_flight: deque[tuple[int, float, float]] = deque()  # due step, seconds of computation, time of completion
    now = worker_free = 0.0
    for step in range(1, n_steps + 1):
        schedule = auto.schedule
        # Gradients arrive in the order of the blocks' numbers.
        n_late = round(auto.tail * n_blocks)
        tail = frozenset(range(n_blocks - n_late, n_blocks))
        staggered = StaggeredSchedule.of(schedule, n_blocks=n_blocks, tail=tail)
        work = device_s(step)
        now += work
        closing = staggered.closing_blocks(step)
        early_s = early_share * work if schedule.publish_lag == 0 else 0.0
        for number, block in enumerate(closing, start=1):
            seconds = job_s(step, step - opened[block])
            is_late = staggered.lag_of(block) > 0
            arrived = 1.0 if is_late else min(1.0, number / (len(closing) * (1 - last_share)))
            worker_free = max(now - early_s * (1 - arrived), worker_free) + seconds
            in_flight.append((staggered.publish_step(step, block), seconds, worker_free))
            opened[block] = step
        due = [i for i, (due_step, _, _) in enumerate(in_flight) if due_step <= step]
        published = [in_flight.popleft() for _ in range(due[-1] + 1 if due else 0)]
        stall = max(0.0, published[-1][2] - now) if published else 0.0
        now += stall
        worker = sum(seconds for _, seconds, _ in published)
        steps.append(
            SimulatedStep(schedule=schedule, tail=n_late / n_blocks, device_s=work, worker_s=worker, stall_s=stall)
        )
        summary = observer.add(device_s=work, worker_s=worker, stall_s=stall)
        if summary is not None:
            load, share = summary
            n_more = blocks_waited_for(load, share, n_blocks=n_blocks, update_interval=schedule.update_interval)
            observation = Observation(
                load=load,
                stall=share,
                max_interval_by_gradients=max_interval_by_gradients(step),
                tail=min(1.0, (n_late + n_more) / n_blocks),
            )
            observed = observation_step(step, schedule), observation
        if observed is not None and step == observed[0]:
            if auto.observe(observed[1]) is not None:
                observer.restart(schedule, auto.schedule)
            observed = None
    return steps
