"""Jobs of the worker: what each changes, against AdamW in Python (`replay_reference`); in which order they are taken, and which words they
wait for.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cpp_build import folder_of, variants
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.native import Acknowledged, JournalEntry, MessageHeader, MessageType, Tentative, Touch
from small_arena import resolved
from worker_blocks import Blocks

NAN = math.nan
LARGE = (40_000, 50_003)
"""Elements of the two parameter groups; the worker cuts their blocks into several pieces."""
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.int8), (torch.float16, torch.bfloat16)]
"""Of the model and of the moments."""


Make = Callable[..., Blocks]


@pytest.fixture(params=variants())
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`Blocks` with a worker of each build, or of the one that the variable names."""
    if "LIGHTNING_ZENFLOW_WORKER" not in os.environ:
        monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(folder_of(request.param) / "zenflow-worker"))
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")
    made: list[Blocks] = []

    def make(*args: Any, word_timeout_s: float = 600.0, **options: Any) -> Blocks:
        made.append(Blocks(*args, **options))
        made[-1].start(word_timeout_s=word_timeout_s)
        return made[-1]

    yield make
    for blocks in made:
        blocks.close()


@pytest.mark.parametrize(("dtype", "moments"), TYPES)
def test_one_behind_shows_the_tentative_step_and_commits_the_true_one(
    make: Make, dtype: torch.dtype, moments: torch.dtype
) -> None:
    """Each step is shown in its own backward pass, corrected at its end, with another learning rate, and committed by the next job."""
    blocks = make(LARGE, n_blocks=3, dtype=dtype, moments=moments, n_threads=2)
    factors, predicted = (0.5, NAN, 0.25, 0.125), (0.75, NAN, 0.5, NAN)
    for step in range(1, 6):
        before = [step - 1] * (step > 1)
        if step < 5:
            blocks.set_step(step, tentative=True)
        for block in range(3):
            if step < 5:
                blocks.arrive(step, predicted[step - 1], block)
                job = blocks.submit(
                    block, *before, step, tentative=Tentative.PREDICTED, buffer=block, ahead=1.5 * block
                )
                blocks.check(job, *(factors[s - 1] for s in before), predicted[step - 1])
            else:
                blocks.check(blocks.submit(block, *before, buffer=block), factors[3])
            assert blocks.arena._header.n_shares == 2
        if step == 5:
            break
        blocks.set_step(step, tentative=False, lr=2e-2)
        blocks.arrive(step, factors[step - 1])
        # In step 2 there is nothing to correct.
        for block in range(3) if step != 2 else ():
            job = blocks.submit(block, step, tentative=Tentative.CORRECTION, buffer=block, ahead=1.5 * block)
            blocks.check(job, factors[step - 1], is_true=True)
    assert resolved(blocks.arena) == (4, 3)


@pytest.mark.parametrize(
    ("kind", "predicted", "factor", "lr", "has_arrived", "is_published"),
    [
        (Tentative.PREDICTED, 0.5, 0.5, 1.0, False, False),
        (Tentative.PREDICTED, 0.5, 0.25, 1.0, False, True),
        (Tentative.PREDICTED, 0.5, 0.5, 2.0, True, True),
        (Tentative.PREDICTED, NAN, NAN, 2.0, False, False),
        (Tentative.PREDICTED, 0.5, NAN, 1.0, False, True),
        (Tentative.TRUE_IF_KNOWN, 0.5, 0.25, 2.0, False, True),
        (Tentative.TRUE_IF_KNOWN, 0.5, 0.25, 2.0, True, False),
    ],
)
def test_only_what_was_predicted_wrongly_is_published_again(
    make: Make, kind: Tentative, predicted: float, factor: float, lr: float, has_arrived: bool, is_published: bool
) -> None:
    """`lr` is the true one over that in backward; the step's word `has_arrived` when the job in backward begins, or arrives later."""
    blocks = make()
    blocks.set_step(1)
    blocks.set_step(1, tentative=False, lr=1e-2 * lr)
    blocks.arrive(1, predicted, 0)
    if has_arrived:
        blocks.arrive(1, factor)
    is_true = has_arrived and kind is Tentative.TRUE_IF_KNOWN
    blocks.check(blocks.submit(0, 1, tentative=kind), factor if is_true else predicted, is_true=is_true)
    blocks.arrive(1, factor)
    # A change that only a new publication would undo.
    blocks.arena.publish[0, 0] += 1
    job = blocks.submit(0, 1, tentative=Tentative.CORRECTION)
    if is_published:
        blocks.check(job, factor, is_true=True)
    else:
        assert blocks.done() == job.job_id
        blocks.arena.publish[0, 0] -= 1
        torch.testing.assert_close(blocks.arena.publish, blocks.published)


@pytest.mark.parametrize(("dtype", "moments"), TYPES)
def test_windows_that_are_submitted_before_their_words(make: Make, dtype: torch.dtype, moments: torch.dtype) -> None:
    """A step that is not finite is skipped; without steps a job publishes; jobs that were submitted before the exit message are done."""
    blocks = make(dtype=dtype, moments=moments)
    blocks.check(blocks.submit(0, buffer=2))
    blocks.set_step(1)
    blocks.arrive(1, 0.5)
    jobs = [blocks.submit(0, 1, 2, ahead=2.0), blocks.submit(1, 1, 2, buffer=1)]
    blocks.set_step(2, lr=5e-3)
    blocks.arrive(2, 1.0)
    for step, factor in ((3, NAN), (4, 0.25)):
        blocks.set_step(step)
        blocks.arrive(step, factor)
    jobs += [blocks.submit(0, 3, 4, ahead=2.0), blocks.submit(1, 3, buffer=1), blocks.submit(1, 4, buffer=1)]
    blocks.worker.submit(MessageHeader(type=MessageType.EXIT))
    assert [blocks.done() for _ in jobs] == [job.job_id for job in jobs]
    factors = {1: 0.5, 2: 1.0, 3: NAN, 4: 0.25}
    for job in jobs:
        blocks.expect(job, *(factors[job.first_step + i] for i in range(len(job.slots))))
    blocks.assert_as_expected()
    assert blocks.worker._process.wait(60) == 0
    assert resolved(blocks.arena) == (4, 3)


def test_the_newest_job_comes_first(make: Make) -> None:
    """Jobs of one block are taken in order, and a request behind all jobs before it; beyond that, the block with the newest job whose first
    one's word has arrived.
    """
    blocks = make((96, 96), n_blocks=3, newest_first=True)
    for step in (1, 2):
        blocks.set_step(step)
    blocks.arrive(1, 1.0)
    blocks.arrive(2, 1.0, 1)
    os.kill(blocks.worker.pid, signal.SIGSTOP)
    # Block 0's second job makes its first one newer than block 1's.
    blocks.submit(0, 1)
    blocks.submit(1, 1, 2, tentative=Tentative.PREDICTED)
    blocks.submit(0)
    blocks.submit(2, 1, 2, tentative=Tentative.PREDICTED)
    first_slot = blocks.arena._header.slots_offset
    blocks.worker.submit(Touch(type=MessageType.TOUCH, request_id=1, offset=first_slot, n_rows=1, row_bytes=1))
    blocks.submit(0)
    os.kill(blocks.worker.pid, signal.SIGCONT)
    assert [blocks.done() for _ in range(3)] == [1, 3, 2]
    blocks.arrive(2, 1.0, 2)
    assert blocks.done() == 4
    assert isinstance(blocks.worker.wait(), Acknowledged)
    assert blocks.done() == 5


def test_words_are_waited_for_after_an_idle_time(make: Make) -> None:
    """One that was idle for longer than words may take, also where another message has been carried out between."""
    blocks = make(newest_first=True, word_timeout_s=0.6)
    for step in (1, 2):
        time.sleep(0.7)
        blocks.set_step(step)
        blocks.submit(0, step, tentative=Tentative.PREDICTED)
        blocks.wait_for_look(f"the word of step {step} and block 0")
        blocks.arrive(step, 1.0, 0)
        blocks.arrive(step, 1.0)
        assert blocks.done() == step


@pytest.mark.parametrize("newest_first", [False, True])
def test_it_says_which_word_it_waits_for(newest_first: bool, make: Make) -> None:
    """Of a word, each part is the last to arrive once; the record held that of an earlier step before."""
    blocks = make(newest_first=newest_first)
    blocks.set_step(1)
    blocks.set_step(2)
    blocks.submit(1, 1, 2, tentative=Tentative.PREDICTED)
    blocks.wait_for_look("the word of step 1")
    blocks.arrive(1, 1.0)
    blocks.wait_for_look("the word of step 2 and block 1")
    # A step's word does not replace the block's.
    blocks.arrive(2, 1.0)
    blocks.wait_for_look("the word of step 2 and block 1")
    blocks.arrive(2, 1.0, 1)
    assert blocks.done() == 1
    blocks.submit(0, 1, 2)
    assert blocks.done() == 2
    step = 2
    for factor in (0.5, 0.0, NAN):
        for last in (slice(0, 1), slice(1, 2), slice(2, 4)):
            step += 1
            blocks.set_step(step)
            word, whole = blocks.arena.word_of(step), step_word(torch.tensor(factor), step)
            before = word[last].clone()
            parts = whole.clone()
            parts[last] = before
            word.copy_(parts)
            blocks.submit(0, step)
            blocks.wait_for_look(f"the word of step {step}")
            assert resolved(blocks.arena)[0] == step - 1
            word.copy_(whole)
            blocks.done()
    assert resolved(blocks.arena) == (step, 8)
    assert blocks.arena.worker_state().endswith("; waits for no word")


def test_the_interrupted_job_is_continued_before_newer_ones(make: Make) -> None:
    """What has not been begun waits for the one that has, also before that one is there. The trainer resubmits jobs in their order."""
    blocks = make(newest_first=True)
    blocks.worker.kill()
    header, (begin, end) = blocks.arena._header, (blocks.partition.blocks[1].begin, blocks.partition.blocks[1].end)
    header.begun_job, header.completed_job, header.n_shares, header.awaited_step = 5, 4, 1, 7
    entry = JournalEntry.from_address(blocks.arena._address() + header.journal_offset)
    entry.begin = entry.position = begin
    entry.end, entry.saved_at = end, 2**64 - 1
    blocks.start()
    assert blocks.arena.worker_state().endswith("; waits for no word")
    blocks.jobs = 2
    blocks.submit(0)
    time.sleep(0.1)
    assert not blocks.worker.has_answered()
    blocks.jobs = 4
    for block in (1, 0, 1):
        blocks.submit(block)
    assert blocks.done() == 5
    assert sorted(blocks.done() for _ in range(3)) == [3, 6, 7]


@pytest.mark.parametrize("when", ["idle", "waits", "busy"])
def test_it_exits_when_the_trainer_dies(when: str, make: Make) -> None:
    """Also while it waits for the second job's word, and where it has an answer that nobody will read."""
    blocks = make()
    if when == "waits":
        for step in (1, 2):
            blocks.set_step(step)
        blocks.arrive(1, 1.0)
        for block, step in ((0, 1), (0, 2), (1, 2)):
            blocks.submit(block, step)
        assert blocks.done() == 1
    if when == "busy":
        os.kill(blocks.worker.pid, signal.SIGSTOP)
        blocks.submit(0)
    blocks.worker._socket.close()
    os.kill(blocks.worker.pid, signal.SIGCONT)
    assert blocks.worker._process.wait(60) == 0
    assert resolved(blocks.arena)[0] == (when == "waits")


def test_rows_of_a_touch_are_allocated(make: Make) -> None:
    blocks = make(LARGE, n_threads=2)
    row_bytes = 10 * 4096
    before = os.fstat(blocks.arena.fd).st_blocks
    touch = Touch(type=MessageType.TOUCH, offset=blocks.arena._header.slots_offset, n_rows=7, row_bytes=row_bytes)
    blocks.worker.submit(touch)
    blocks.worker.wait()
    assert os.fstat(blocks.arena.fd).st_blocks == before + 7 * row_bytes // 512
    assert not blocks.arena.slots.any()
