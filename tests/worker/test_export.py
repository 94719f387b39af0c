"""The worker exports the state of device-owned entries: the right bits, across its death, and as stall only where training waits."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, Slice, build_partition, column_count, group_begins
from lightning_zenflow.offload.columns import Columns, DeviceColumns, export_regions, region_sizes
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.worker.process import JobMessage, WorkerError
from lightning_zenflow.worker.supervisor import Submission
from models import generator
from processes import wait_for
from rank_states import make_rank_state, supervised_worker
from small_arena import GROUPS

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

RATIO = 0.3


def make_partition(n_blocks: int) -> Partition:
    """Two groups: a part of a matrix that begins and ends inside a row, a vector; a matrix of few rows."""
    sizes = [1500, 400]
    second = group_begins(sizes)[1]
    shapes = [(0, 0, 1400, 13, 31, True), (0, 1400, 77, 0, 1, False), (1, second, 387, 0, 129, True)]
    fields = ("param_group", "begin", "numel", "start", "columns", "is_matrix")
    slices = [Slice(parameter=i, **dict(zip(fields, shape, strict=True))) for i, shape in enumerate(shapes)]
    return build_partition(slices, sizes, n_blocks)


def random_columns(partition: Partition, seed: int, share: float = RATIO) -> list[Columns | None]:
    chosen: list[Columns | None] = []
    for index, s in enumerate(partition.slices):
        k = column_count(s.columns, share)
        columns = torch.randperm(s.columns, generator=generator(seed, index))[:k].sort().values
        chosen.append(Columns(device=columns, host=columns) if s.is_matrix else None)
    return chosen


def expected_state(rank: RankState, block: int, columns: list[Columns | None]) -> list[Tensor]:
    """For each group the state of the block's owned entries, element by element."""
    owned: list[list[int]] = [[] for _ in rank.partition.group_begins]
    for tile in (rank.partition.tiles[index] for index in rank.partition.blocks[block].tiles):
        s, chosen = rank.partition.slices[tile.slice], columns[tile.slice]
        for element in range(tile.begin, tile.end):
            if chosen is None or (s.start + element - s.begin) % s.columns in chosen.host:
                owned[s.param_group].append(element)
    arena = rank.arena
    return [torch.stack([a[e] for a in (arena.master, arena.exp_avg.array, arena.exp_avg_sq.array)]) for e in owned]


class Setting:
    """A rank with random state, a job for each block, and its worker."""

    def __init__(self, n_blocks: int = 3, *, n_threads: int = 1, topk_ratio: float = RATIO) -> None:
        self.partition = make_partition(n_blocks)
        weights = [torch.zeros(1500), torch.zeros(400)]
        self.rank = make_rank_state(self.partition, weights, topk_ratio=topk_ratio)
        arena = self.rank.arena
        for seed, array in enumerate((arena.master, arena.exp_avg.array, arena.exp_avg_sq.array)):
            array.copy_(torch.rand(array.shape, generator=generator(seed)))
        arena.slots.copy_(torch.randn(arena.slots.shape, generator=generator(9)))
        arena.write_hyperparameters(1, GROUPS)
        arena.step_words.write(1, 1, torch.tensor(1.0))
        self.worker = supervised_worker(self.rank, n_threads=n_threads)
        self.jobs: list[Submission] = []

    def columns(self, block: int, chosen: list[Columns | None]) -> DeviceColumns:
        sizes = region_sizes(self.partition, RATIO)
        regions = export_regions(self.rank, self.worker, sizes)
        numels = sizes[block].of_groups
        # In the middle of memory that other blocks have, too.
        states = [torch.full((3, n + 5), torch.nan).narrow(1, 2, n) for n in numels]
        staging = [torch.full((n,), torch.nan) for n in numels]
        return DeviceColumns(self.rank, block, chosen, regions[block], states=states, staging=staging)

    def submit(self, block: int) -> None:
        message = JobMessage(job_id=1 + block, block=block, first_step=1, slots=[block], publish_buffer=0)
        self.jobs.append(self.worker.submit(message))

    def close(self) -> None:
        self.worker.kill()
        self.rank.arena.close(keep_state=False)


@pytest.mark.parametrize(
    ("n_blocks", "n_threads", "share", "killed_in"),
    [(5, 2, RATIO, None), (40, 2, 0.01, None), *((3, 1, RATIO, block) for block in range(3))],
)
def test_the_state_after_the_blocks_last_job(
    n_blocks: int, n_threads: int, share: float, killed_in: int | None
) -> None:
    """Also of a worker that has been killed, once it has been given the block's job."""
    setting = Setting(n_blocks, n_threads=n_threads)
    chosen = random_columns(setting.partition, 1, share)
    every = [setting.columns(block, chosen) for block in range(len(setting.partition.blocks))]
    process = psutil.Process(setting.worker.pid)
    for block, columns in enumerate(every):
        if block == killed_in:
            # The answers to what came before may have been read or not.
            process.suspend()
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        setting.submit(block)
        columns.request("select")
    if killed_in is not None:
        process.kill()
    # Answers of jobs and exports alternate; jobs are asked for first.
    for job in setting.jobs:
        setting.worker.wait_for(job)
    for block, columns in enumerate(every):
        columns.load("select")
        assert all(map(torch.equal, columns._states, expected_state(setting.rank, block, chosen)))
        shown = torch.cat(columns._staging)
        assert torch.equal(shown, torch.cat([state[0] for state in columns._states]))
    numel = sum(columns.numel for columns in every)
    telemetry = setting.rank.telemetry
    assert (telemetry.d2h_bytes, telemetry.h2d_bytes) == (0, 12 * numel)
    assert telemetry.worker_restarts == (killed_in is not None)
    setting.close()


def test_only_a_wait_is_a_stall() -> None:
    setting = Setting()
    stalls = setting.rank.telemetry
    columns = setting.columns(0, random_columns(setting.partition, 1))
    columns.request("select")
    (request,) = setting.worker._unanswered
    wait_for(lambda: setting.worker.has_answered(request))
    columns.load("select")
    assert not stalls.seconds
    assert stalls.worker_busy_s > 0
    os.kill(setting.worker.pid, signal.SIGSTOP)
    columns.request("flush")
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(setting.worker.pid, signal.SIGCONT))).start()
    columns.load("flush")
    assert set(stalls.seconds) == {"flush"}
    assert stalls.seconds["flush"] > 0.1
    request = setting.worker.enqueue_export(tiles_offset=0, n_tiles=1)
    with pytest.raises(WorkerError, match="failed: export: tiles must lie in the export section"):
        setting.worker.wait_for(request)
    setting.close()
