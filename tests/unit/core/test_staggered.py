"""Closing steps, and the numbers of slots, buffers and records, against a simulation of training."""

from collections import deque

import pytest

from lightning_zenflow.core.schedule import StaggeredSchedule, UpdateSchedule, blocks_wanted


@pytest.mark.parametrize("update_interval", [1, 2, 4, 8])
@pytest.mark.parametrize("publish_lag", [0, 1, 2, 5])
def test_gradients_kept_for_reapplying(update_interval: int, publish_lag: int) -> None:
    """Each block keeps those of the steps after its oldest job in flight was submitted."""
    pair = UpdateSchedule(update_interval=update_interval, publish_lag=publish_lag)
    schedule = StaggeredSchedule.of(pair, n_blocks=update_interval)
    for step in range(20, 30):
        oldest: dict[int, int] = {}
        for submitted in range(step - publish_lag, step):
            for block in schedule.closing_blocks(submitted):
                oldest.setdefault(block, submitted)
        kept = sum(step - submitted for submitted in oldest.values())
        assert kept / update_interval == pair.kept_share


def simulate(schedule: StaggeredSchedule, steps: int) -> tuple[int, int, int]:
    """Largest numbers of slots, publish buffers and step records in use, and that each block closes once in a window.

    A window is the list of steps whose gradients it holds; a job is a submitted window with its publish step.
    """
    windows: list[list[int]] = [[] for _ in range(schedule.n_blocks)]
    jobs: deque[tuple[int, list[int]]] = deque()
    slots = buffers = records = 0
    for step in range(1, steps + 1):
        for window in windows:
            window.append(step)
        slots = max(slots, sum(map(len, windows)) + sum(len(w) for _, w in jobs))
        records = max(records, *(step - min(held) + 1 for held in [*windows, *(w for _, w in jobs)]))
        for block in schedule.closing_blocks(step):
            assert step < schedule.update_interval or len(windows[block]) == schedule.update_interval
            jobs.append((step + schedule.publish_lag, windows[block]))
            windows[block] = []
        buffers = max(buffers, len(jobs))
        while jobs and jobs[0][0] <= step:
            jobs.popleft()
    return slots, buffers, records


@pytest.mark.parametrize(("update_interval", "publish_lag"), [(1, 0), (1, 1), (4, 0), (4, 1), (7, 3)])
def test_slots_and_buffers_suffice_and_are_not_wasted(update_interval: int, publish_lag: int) -> None:
    """A run of full windows needs all of them: S (S + 1) / 2 + S d slots of host memory for S blocks."""
    for n_blocks in (1, update_interval, 2 * update_interval + 1):
        schedule = StaggeredSchedule(n_blocks=n_blocks, update_interval=update_interval, publish_lag=publish_lag)
        slots, buffers, records = simulate(schedule, 100)
        assert slots <= schedule.n_slots and buffers <= schedule.n_publish_buffers
        assert records <= schedule.n_step_records
        if n_blocks == update_interval:
            assert (slots, buffers) == (schedule.n_slots, schedule.n_publish_buffers)


@pytest.mark.parametrize(
    ("intervals", "in_backward", "numel", "blocks"),
    [
        ([1], True, 0, 16),
        ([1, 2], True, 16 << 22, 16),
        ([1], True, (16 << 22) + 1, 17),
        ([1], True, 7_000_000_000, 64),
        ([4], False, 7_000_000_000, 4),
        ([80], True, 7_000_000_000, 80),
    ],
)
def test_blocks_of_a_partition(intervals: list[int], in_backward: bool, numel: int, blocks: int) -> None:
    assert blocks_wanted(intervals, in_backward=in_backward, numel=numel) == blocks
