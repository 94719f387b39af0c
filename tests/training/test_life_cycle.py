"""From setup to the end of training, whatever that is, and what is left behind."""

import gc
import math
import mmap
import multiprocessing
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from typing_extensions import override

from callbacks import At
from harness import PLACES, Case, fit, make_trainer, optimizer_of, run_here, snapshot, workers
from lightning_zenflow import StallMonitor, ZenFlowStrategy
from lightning_zenflow.deepspeed import trained_engine
from lightning_zenflow.worker.machine import HOST_MEMORY
from models import TINY, LinearLossModule
from networks import Perceptron
from processes import ArenaWatch, arena_mappings, leaves_no_file_open, shared_bytes
from rank_processes import run_on_ranks
from same_bits import assert_same_tensors

CASE = Case(steps=4, model_options={"shapes": TINY})


def linear() -> LinearLossModule:
    return LinearLossModule(shapes=TINY)


Wide = partial(Perceptron, widths=(1000, 500, 1000))
"""4 MB of weights, in modules of their own, so that stage 3 fetches them one after the other."""


@pytest.mark.parametrize("fits", [4, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", PLACES)
def test_fits_leave_nothing_behind(stage: str, fits: int) -> None:
    """Arenas and descriptors are freed with the last reference to the trainer, which set-up collects, as it would count as taken."""
    process = psutil.Process()

    def train() -> list[Callable[[], Any]]:
        model, strategy = Wide(), ZenFlowStrategy(**PLACES[stage])
        trainer = fit(model, strategy, limit_val_batches=1)
        trainer.test(model, verbose=False)
        if len(references) % 2:
            ends = Ends("step 2")
            with pytest.raises(RuntimeError, match="own mistake"):
                fit(model, ZenFlowStrategy(**PLACES[stage]), callbacks=[ends])
            ends.arena.close()
        return [weakref.ref(x) for x in (model, strategy, trainer, strategy.zenflow_optimizer)]

    references: list[list[Callable[[], Any]]] = []
    for _ in range(2):
        references.append(train())
    gc.collect()
    before, resident = len(arena_mappings()), process.memory_info().rss
    gc.disable()
    try:
        with leaves_no_file_open():
            for _ in range(fits - len(references)):
                references.append(train())
                # Every second time two trainings.
                assert len(arena_mappings()) <= before + 2
            gc.collect()
            assert len(arena_mappings()) == before
    finally:
        gc.enable()
    assert [reference() for of_fit in references for reference in of_fit] == [None] * 4 * fits
    # Of 4 MB weights, and of 12 MB state, in each fit; allocators and caches grow by up to 20 MB at first.
    assert process.memory_info().rss - resident < 3e7


def test_a_monitor_keeps_nothing_of_a_fit_that_failed() -> None:
    """Of its arena neither, which the next set-up would count as taken."""
    monitor = StallMonitor()
    references: list[Callable[[], Any]] = []
    alive: list[bool] = []

    def note(trainer: pl.Trainer) -> None:
        gc.collect()
        alive.extend(reference() is not None for reference in references)
        references.append(weakref.ref(optimizer_of(trainer)))

    for at in ("step 2", "the end"):
        with pytest.raises(RuntimeError, match="own mistake") if at == "step 2" else nullcontext():
            fit(linear(), ZenFlowStrategy(), callbacks=[monitor, At("on_fit_start", note), Ends(at)])
    assert alive == [False]


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}])
def test_the_environment_is_left_as_it_was(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process started from here trains by itself; what torchrun has set stays. Evaluation works without a fit."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(ZenFlowStrategy(), max_steps=3, limit_val_batches=1)
    functions: list[Callable[..., Any]] = [trainer.validate, trainer.test, trainer.predict, trainer.fit, trainer.test]
    for function in functions:
        function(linear())
        assert {name: os.environ[name] for name in names if name in os.environ} == given


def test_no_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of PATH that the user may not read is no error. One with a file that is no program has the same, for root too."""
    (tmp_path / "numactl").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    run_here(replace(CASE, stage=3))


@dataclass
class Ends(pl.Callback):
    """Ends a fit with an error at a step or a validation, or not at all."""

    at: str

    def _end(self, at: str) -> None:
        if self.at == at:
            raise RuntimeError("the user's own mistake")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.arena = ArenaWatch(trainer.strategy)
        assert len(workers()) == 1
        assert self.arena.n_bytes > 0

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end(f"step {trainer.global_step}")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end("validation")


@pytest.mark.parametrize("at", ["validation", "no time"])
def test_an_exact_state_remains_when_fit_ends(at: str, tmp_path: Path) -> None:
    """It can be saved, and trained further; slots and buffers are gone."""
    ends = Ends(at)
    options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "callbacks": [ends]}
    trainer = make_trainer(CASE.make_strategy(), max_steps=2, **options)
    with nullcontext() if at == "no time" else pytest.raises(RuntimeError, match="own mistake"):
        trainer.fit(CASE.make_model())
    assert workers() == []
    assert ends.arena.n_bytes <= 12 * sum(math.prod(shape) for shape in TINY) + 64 * mmap.PAGESIZE
    ends.arena.close()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = run_here(replace(CASE, checkpoint=str(tmp_path / "a.ckpt")))
    assert len(resumed.losses) == CASE.steps - 2
    assert_same_tensors(resumed.master, run_here(replace(CASE, loop="direct")).master)


def test_nothing_remains_after_an_error_at_setup() -> None:
    """DeepSpeed's engine refuses the scheduler after it has built the optimizer, and with it the worker."""
    gc.collect()
    before = shared_bytes()
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "NoSuchScheduler", "params": {}}}
    with pytest.raises(AssertionError, match="NoSuchScheduler"):
        fit(linear(), ZenFlowStrategy(config=config))
    assert workers() == []
    assert shared_bytes() <= before


def break_rank_1(environment: dict[str, str], cores: Sequence[int], trainer: pl.Trainer) -> None:
    """Makes it fail at set-up."""
    if trainer.global_rank == 1:
        os.environ.update(environment)
        os.sched_setaffinity(0, cores)


def mend(environment: dict[str, str], cores: Sequence[int], _: pl.Trainer) -> None:
    """When training ends with the error, no rank has a worker."""
    for name in environment:
        os.environ.pop(name, None)
    os.sched_setaffinity(0, cores)
    assert workers() == []


def test_an_error_of_one_rank_at_setup_is_raised_on_all() -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    cores = all_cores[:2]
    breaks: dict[str, tuple[dict[str, str], list[int]]] = {
        "/no/such/worker": ({"LIGHTNING_ZENFLOW_WORKER": "/no/such/worker"}, all_cores),
        # On one core no rank can have others than the others have.
        **({"worker_cores must be": ({}, cores[:1])} if len(cores) == 2 else {}),
        "ZENFLOW_KERNELS must be": ({"ZENFLOW_KERNELS": "none"}, all_cores),
        "ZENFLOW_MAX_CPU_ISA must be": ({"ZENFLOW_MAX_CPU_ISA": "sse2"}, all_cores),
        "ZenFlow needs .*update_interval=4, publish_lag=1": ({HOST_MEMORY: "1e-6"}, all_cores),
    }
    cases = {}
    for i, (environment, left) in enumerate(breaks.values()):
        mends = At("on_exception", partial(mend, environment, all_cores))
        callbacks = (At("setup", partial(break_rank_1, environment, left)), mends)
        cases[str(i)] = replace(CASE, fails=True, callbacks=callbacks).with_keys(worker_cores=cores)
    runs = run_on_ranks(cases)
    for message, (other, failed) in zip(breaks, runs.values(), strict=True):
        assert failed.error is not None and other.error is not None
        assert re.search(f"Error: .*{message}|Exception: {message}", failed.error)
        assert re.search(f"(Error|Exception): rank 1: .*{message}", other.error)
        # That of `mend`, whose error would be chained.
        assert "AssertionError" not in failed.error + other.error


@pytest.mark.parametrize("stage", ["stage 2", "in host memory"])
def test_a_child_leaves_a_training_by_an_exit(stage: str) -> None:
    """It neither ends the worker nor reads memory that it does not have; the training goes on."""
    parent, children = os.getpid(), list[int]()

    def fork(trainer: pl.Trainer) -> None:
        if trainer.global_step == 3:
            children.append(os.fork())
            if children[0] == 0:
                sys.exit(7)

    try:
        trainer = fit(Wide(), ZenFlowStrategy(**PLACES[stage]), steps=5, callbacks=[At("on_train_batch_end", fork)])
    except SystemExit as end:
        os._exit(end.code if os.getpid() != parent else 1)  # type: ignore[arg-type]
    finally:
        if os.getpid() != parent:
            os._exit(1)
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert trainer.global_step == 5


@pytest.mark.parametrize("stage", PLACES)
def test_two_at_once_in_two_threads(stage: str) -> None:
    """DeepSpeed sets up one at a time, for which the other waits; both train as one alone."""
    build, inside, together = trained_engine.initialize, threading.Semaphore(1), threading.Barrier(2)
    models, alone = (Wide(), Wide()), Wide()

    def alone_inside(*args: Any, **kwargs: Any) -> Any:
        assert inside.acquire(blocking=False)
        try:
            return build(*args, **kwargs)
        finally:
            inside.release()

    def train(model: Perceptron) -> None:
        meet = lambda _: together.wait(100)  # noqa: E731
        callbacks = [At(hook, meet) for hook in ("on_fit_start", "on_train_batch_start", "on_train_end")]
        fit(model, ZenFlowStrategy(**PLACES[stage]), steps=3, callbacks=callbacks)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(trained_engine, "initialize", alone_inside)
        list(pool.map(train, models))
    fit(alone, ZenFlowStrategy(**PLACES[stage]), steps=3)
    for model in models:
        assert_same_tensors(snapshot(model), snapshot(alone))


def exit_code_of_child(work: Callable[[], object]) -> int | None:
    """Of a forked process; None: it has not ended within a minute."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


def test_in_a_process_that_was_forked_behind_a_fit(tmp_path: Path) -> None:
    """It has neither the threads of the process group nor the optimizer's state."""
    trainer = fit(linear())

    def refused() -> None:
        for call in (fit, make_trainer(ZenFlowStrategy()).test):
            with pytest.raises(
                RuntimeError, match=r"call `torch.distributed.destroy_process_group\(\)` before the fork"
            ):
                call(linear())
        with pytest.raises(RuntimeError, match="has no state of the optimizer: save checkpoints"):
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    assert exit_code_of_child(refused) == 0
    torch.distributed.destroy_process_group()
    assert exit_code_of_child(lambda: fit(linear())) == 0
    fit(linear())
