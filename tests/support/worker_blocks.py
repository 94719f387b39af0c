"""A worker whose jobs are compared with AdamW in Python (`replay_reference`)."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_zenflow.core.step_inputs import GroupHyperparameters, step_word
from lightning_zenflow.native import Done, Tentative
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import JobMessage, Worker
from models import generator
from processes import wait_for
from replay_reference import ReplayedAdamW
from small_arena import GROUPS, SIZES, make_partition

SMALL = (150, 130)
"""Elements of the two parameter groups."""


class Blocks:
    """An arena with random states, perhaps its worker, and the state that jobs are to leave: each tile is a parameter of `ReplayedAdamW`.

    Args:
        counts: elements of the two parameter groups.
        n_blocks: number of blocks.
        dtype: of the model.
        moments: type of the moments.
        n_threads: of the worker.
        sizes: other sizes of the arena.
    """

    def __init__(
        self,
        counts: Sequence[int] = SMALL,
        *,
        n_blocks: int = 2,
        dtype: torch.dtype = torch.float32,
        moments: torch.dtype = torch.float32,
        n_threads: int = 1,
        **sizes: Any,
    ) -> None:
        self.partition, self.dtype, self.rounds = make_partition(n_blocks, counts), dtype, moments != torch.float32
        all_sizes = {"n_step_records": 4, "n_slots": 4 * n_blocks, "n_threads": n_threads, **sizes}
        of_types = replace(SIZES, dtype=dtype, moments_dtype=moments, **all_sizes)
        self.arena = Arena(self.partition, of_types, device=torch.device("cpu"))
        master, m, root = torch.randn(3, self.partition.numel, generator=generator(3))
        m[::11], root[::13] = 0.0, 0.0
        self.arena.master.copy_(0.02 * master)
        self.arena.exp_avg_sq.write(0, (1e-3 * root).square())
        self.arena.exp_avg.write(0, 1e-3 * m)
        elements = [torch.arange(tile.begin, tile.end) for tile in self.partition.tiles]
        self.expected = ReplayedAdamW(
            master=[self.arena.master[e] for e in elements],
            elements=elements,
            scales=[torch.arange(len(e)) // 128 for e in elements] if moments == torch.int8 else None,
        )
        self.expected.exp_avg, self.expected.exp_avg_sq = (
            [moment.read(tile.begin, tile.numel).float().clone() for tile in self.partition.tiles]
            for moment in (self.arena.exp_avg, self.arena.exp_avg_sq)
        )
        self.padding, self.published = self.arena.master.clone(), self.arena.publish.clone()
        self.groups: dict[tuple[int, bool], list[GroupHyperparameters]] = {}
        self.jobs = 0
        # They may be the same ones.
        self._cores = (allowed_cores() * n_threads)[:n_threads]

    def start(self, *, word_timeout_s: float = 600.0) -> None:
        """Starts a worker."""
        self.worker = Worker(self.arena, cores=self._cores, timeout_s=120, word_timeout_s=word_timeout_s)

    def close(self) -> None:
        self.worker.kill()
        self.arena.close(keep_state=False)

    def slot(self, step: int, block: int) -> int:
        return step % 4 * len(self.partition.blocks) + block

    def set_step(self, step: int, *, tentative: bool | None = None, lr: float = 1e-2) -> None:
        """Writes gradients, and hyperparameters of one set or of both."""
        gradient = self.gradient(step)
        for number, block in enumerate(self.partition.blocks):
            self.arena.slots[self.slot(step, number), : block.end - block.begin] = gradient[block.begin : block.end]
        for of_set in (False, True) if tentative is None else (tentative,):
            self.groups[step, of_set] = [replace(group, lr=lr * group.lr) for group in GROUPS]
            self.arena.write_hyperparameters(step, self.groups[step, of_set], tentative=of_set)

    def gradient(self, step: int) -> torch.Tensor:
        return (1e-2 * torch.randn(self.partition.numel, generator=generator(4, step))).to(self.dtype)

    def arrive(self, step: int, factor: float, block: int | None = None) -> None:
        """Writes the word of a step, or of a block in it."""
        words = self.arena.word_of(step) if block is None else self.arena.block_words[block]
        words.copy_(step_word(torch.tensor(factor), step))

    def job(
        self, block: int, *steps: int, tentative: Tentative = Tentative.NONE, buffer: int = 0, ahead: float = 0.0
    ) -> JobMessage:
        """The next job, of these steps."""
        self.jobs += 1
        return JobMessage(
            job_id=self.jobs,
            block=block,
            first_step=steps[0] if steps else 1,
            slots=[self.slot(step, block) for step in steps],
            publish_buffer=buffer,
            prediction_steps=ahead,
            tentative=tentative,
        )

    def submit(self, block: int, *steps: int, **options: Any) -> JobMessage:
        """Submits the next job."""
        job = self.job(block, *steps, **options)
        self.worker.submit(job)
        return job

    def done(self) -> int:
        answer = self.worker.wait()
        assert isinstance(answer, Done)
        return answer.job_id

    def check(self, job: JobMessage, *factors: float, is_true: bool = False) -> None:
        """Waits for a job, and compares with `expect`."""
        assert self.done() == job.job_id
        self.expect(job, *factors, is_true=is_true)
        self.assert_as_expected()

    def expect(self, job: JobMessage, *factors: float, is_true: bool = False) -> None:
        """A job is to apply its steps with these factors; the tentative one with the first set of hyperparameters if `is_true`."""
        tiles = self.partition.blocks[job.block].tiles
        n_committed = len(factors) - bool(job.tentative)
        last: list[GroupHyperparameters] = []

        def apply(to: ReplayedAdamW, index: int, *, of_second_set: bool) -> None:
            step, gradient = job.first_step + index, self.gradient(job.first_step + index)
            groups = self.groups[step, of_second_set]
            of_tiles = [groups[self.partition.slices[tile.slice].param_group] for tile in self.partition.tiles]
            gradients = [
                gradient[tile.begin : tile.end] if number in tiles else None
                for number, tile in enumerate(self.partition.tiles)
            ]
            to.step(gradients, of_tiles, factors[index])
            if math.isfinite(factors[index]):
                last[:] = of_tiles

        for index in range(n_committed):
            apply(self.expected, index, of_second_set=False)
        shown = copy.deepcopy(self.expected)
        if last and self.rounds:
            of_block = [torch.full((t.numel,), n in tiles) for n, t in enumerate(self.partition.tiles)]
            self.expected.close_windows(of_block, job.first_step + n_committed - 1)
        if job.tentative:
            apply(shown, n_committed, of_second_set=not is_true)
        begin = self.partition.blocks[job.block].begin
        for number in tiles:
            tile, weights = self.partition.tiles[number], shown.master[number]
            if last and job.prediction_steps:
                weights = shown.predicted(number, last[number], job.prediction_steps)
            self.published[job.publish_buffer, tile.begin - begin : tile.end - begin] = weights.to(self.dtype)

    def assert_as_expected(self) -> None:
        whole = self.padding.clone()
        for number, tile in enumerate(self.partition.tiles):
            whole[tile.begin : tile.end] = self.expected.master[number]
            for moment, expected in (
                (self.arena.exp_avg, self.expected.exp_avg),
                (self.arena.exp_avg_sq, self.expected.exp_avg_sq),
            ):
                assert torch.equal(moment.read(tile.begin, tile.numel).float(), expected[number])
        assert torch.equal(self.arena.master, whole)
        assert torch.equal(self.arena.publish, self.published)

    def wait_for_look(self, word: str) -> None:
        """Until the worker waits for a word, and looks again."""
        wait_for(lambda: self.arena.worker_state().endswith(f"; waits for {word}"))
        looks = self.arena.n_looks
        wait_for(lambda: self.arena.n_looks > looks + 1)
