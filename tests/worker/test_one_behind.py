"""Tentative parts of jobs, with the real executable: weights are shown one update before the state has it, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.process import JobMessage, Worker
from lightning_zenflow.worker.topology import allowed_cores
from small_arena import GROUPS, fill_slot, make_arena, make_partition, write_step

STEPS = 6
FACTORS = {1: 1.0, 2: 0.25, 3: 0.5, 4: float("nan"), 5: 0.125, 6: 1.0}


class Run:
    """Windows of S steps on each block. Keeps what each job publishes."""

    def __init__(self, *, update_interval: int, one_behind: bool) -> None:
        self._partition = make_partition()
        self.arena = make_arena(self._partition, torch.bfloat16)
        self.published: list[Tensor] = []
        self._job_id = 0
        self._worker = Worker(self.arena, cores=allowed_cores()[:1], timeout_s=30)
        pending = 0
        for last in range(update_interval, STEPS + 1, update_interval):
            steps = list(range(last - update_interval + 1, last + 1))
            for step in steps[:-1] if one_behind else steps:
                write_step(self.arena, step, factor=FACTORS[step])
            if one_behind:
                self.arena.write_hyperparameters(last, GROUPS, tentative=True)
                # The prediction is right.
                for block in range(len(self._partition.blocks)):
                    self.arena.block_words.write(block, last, torch.tensor(FACTORS[last]))
            for block in range(len(self._partition.blocks)):
                self._submit(block, [pending, *steps] if pending else steps, has_tentative=one_behind)
            if one_behind:
                write_step(self.arena, last, factor=FACTORS[last])
                pending = last
        if pending:
            for block in range(len(self._partition.blocks)):
                self._submit(block, [pending])
        self._worker.close()

    def _submit(self, block: int, steps: list[int], *, has_tentative: bool = False) -> None:
        self._job_id += 1
        slots = [5 * block + step % 5 for step in steps]
        for slot, step in zip(slots, steps, strict=True):
            fill_slot(self.arena, self._partition, block, slot, step)
        self._worker.submit(
            JobMessage(
                job_id=self._job_id,
                block=block,
                first_step=steps[0],
                slots=slots,
                publish_buffer=block,
                has_tentative=has_tentative,
            )
        )
        assert self._worker.wait().job_id == self._job_id
        self.published.append(self.arena.publish[block].clone())


def state_of(arena: Arena) -> Tensor:
    return torch.cat([arena.master, arena.exp_avg, arena.exp_avg_sq])


@pytest.mark.parametrize("update_interval", [1, 2, 3])
def test_right_predictions_show_the_weights_of_a_synchronous_run(update_interval: int) -> None:
    exact = Run(update_interval=update_interval, one_behind=False)
    ours = Run(update_interval=update_interval, one_behind=True)
    n_jobs = len(exact.published)
    assert all(torch.equal(a, b) for a, b in zip(ours.published[:n_jobs], exact.published, strict=True))
    # The flush shows the same weights again.
    assert all(torch.equal(a, b) for a, b in zip(ours.published[n_jobs:], exact.published[-3:], strict=True))
    assert torch.equal(state_of(ours.arena), state_of(exact.arena))
    assert ours.arena.resolved == exact.arena.resolved == (STEPS, STEPS - 1)
    for run in (ours, exact):
        run.arena.close(keep_state=False)
