"""From setup to the end of training, whatever that is, and what is left behind."""

import contextlib
import dataclasses
import gc
import math
import mmap
import os
import re
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from harness import Case, fit, make_trainer, run_here, snapshot, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.worker.process import WorkerError
from models import TINY, LinearLossModule
from processes import ArenaWatch, arena_mappings, leaves_no_file_open, shared_bytes
from rank_processes import run_on_ranks
from reference import adamw_reference

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def linear(**options: Any) -> LinearLossModule:
    return LinearLossModule(shapes=TINY, **options)


@pytest.mark.parametrize("same_trainer", [False, True])
def test_fit_twice(same_trainer: bool) -> None:
    """A second fit starts from the weights that the first one left, with fresh moments and hooks."""
    model = linear()
    trainer = fit(model, steps=4)
    middle = snapshot(model)
    if same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 10
        trainer.fit(model)
    else:
        fit(model, steps=10)
    # The data is a function of `global_step`, which goes on in the same trainer.
    case = Case(steps=10, model_options={"shapes": TINY}, optimizer=model.optimizer_options)
    _, gradients, groups = case.fixed_gradients()
    first = 4 if same_trainer else 0
    exact = adamw_reference(middle, gradients[first:], groups[: 10 - first]).weights
    for a, b in zip(snapshot(model), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


def test_fits_leave_no_memory_behind() -> None:
    """Their arenas and descriptors are freed with the last reference to the trainer."""
    fit(linear())
    gc.collect()
    before = len(arena_mappings())
    with leaves_no_file_open():
        for _ in range(2):
            fit(linear())
        gc.collect()
        assert len(arena_mappings()) == before


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}])
def test_the_environment_is_left_as_it_was(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process started from here trains by itself; what torchrun has set stays."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    trainer = fit(linear())
    assert {name: os.environ[name] for name in names if name in os.environ} == given
    # Again, and in another function of the same trainer.
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(linear())
    trainer.validate(linear(), verbose=False)
    assert {name: os.environ[name] for name in names if name in os.environ} == given


def test_evaluation_without_fit() -> None:
    model = linear()
    trainer = make_trainer(ZenFlowStrategy(), limit_val_batches=1)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    assert len(trainer.predict(model) or []) == 1


class Fails(LinearLossModule):
    """Fails in a step, counted from 0."""

    error: type[BaseException] = RuntimeError
    at = 5
    arena: ArenaWatch

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            assert len(workers()) == 1
            self.arena = ArenaWatch(self.trainer.strategy)
            assert self.arena.n_bytes > 0
            raise self.error("the user's own mistake")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_remains_when_steps_are_interrupted(error: type[BaseException], tmp_path: Path) -> None:
    """Neither worker nor memory, as soon as `fit` is left; the incomplete state cannot be saved. Lightning ends the process on Ctrl-C."""
    model = Fails(shapes=TINY)
    model.error = error
    trainer = make_trainer(ZenFlowStrategy(), max_steps=10, limit_val_batches=1)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(model)
    assert workers() == []
    assert model.arena.n_bytes == 0
    model.arena.close()
    assert [p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"]] == [0, 0]
    with pytest.raises(WorkerError, match="training ended before the worker had applied all of its 5 steps"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    # Its weights are there, for another Trainer too.
    model.at = 1000
    trainer.validate(model, verbose=False)
    fit(model, steps=4)


@pytest.mark.parametrize("at", ["the first step", "validation", "no time"])
def test_an_exact_state_remains_when_fit_ends(at: str, tmp_path: Path) -> None:
    """It can be saved, and trained further; slots and buffers are gone."""
    watched: list[ArenaWatch] = []

    class Ends(pl.Callback):
        @override
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            watched.append(ArenaWatch(trainer.strategy))
            if at == "the first step":
                raise RuntimeError("the user's own mistake")

        @override
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if at == "validation":
                raise RuntimeError("the user's own mistake")

    case = Case(steps=4, model_options={"shapes": TINY})
    n_steps = 0 if at == "the first step" else 2
    trainer = make_trainer(
        case.make_strategy(), max_steps=2, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0,
        callbacks=[Ends()],
    )  # fmt: skip
    with contextlib.nullcontext() if at == "no time" else pytest.raises(RuntimeError, match="own mistake"):
        trainer.fit(case.make_model())
    assert workers() == []
    n_elements = sum(math.prod(shape) for shape in TINY)
    assert watched[0].n_bytes <= 12 * n_elements + 64 * mmap.PAGESIZE
    watched[0].close()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = run_here(dataclasses.replace(case, checkpoint=str(tmp_path / "a.ckpt")))
    assert len(resumed.losses) == case.steps - n_steps
    for ours, theirs in zip(resumed.master, run_here(case).master, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("why", ["no worker", "no scheduler"])
def test_nothing_remains_after_an_error_at_setup(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's engine refuses the scheduler after it has built the optimizer, and with it the worker."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "NoSuchScheduler", "params": {}},
    }
    if why == "no worker":
        monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", "/bin/false")
    gc.collect()
    before = shared_bytes()
    error, message = (
        (WorkerError, "exited with status 1") if why == "no worker" else (AssertionError, "NoSuchScheduler")
    )
    with pytest.raises(error, match=message):
        fit(linear(), ZenFlowStrategy(config=config))
    assert workers() == []
    assert shared_bytes() <= before


@dataclasses.dataclass
class CannotBuild(pl.Callback):
    """Makes rank 1 fail at set-up; when training ends with the error, no rank has a worker."""

    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    only_core: int | None = None
    """The core that the rank may use, if it is not all of them."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        if trainer.global_rank == 1:
            os.environ.update(self.environment)
            if self.only_core is not None:
                self.cores = os.sched_getaffinity(0)
                os.sched_setaffinity(0, {self.only_core})

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        for name in self.environment:
            os.environ.pop(name, None)
        if self.only_core is not None and trainer.global_rank == 1:
            os.sched_setaffinity(0, self.cores)
        assert workers() == []


def test_an_error_of_one_rank_at_setup_is_raised_on_all() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    breaks = {
        "/no/such/worker": CannotBuild(environment={"LIGHTNING_ZENFLOW_WORKER": "/no/such/worker"}),
        "worker_cores must be": CannotBuild(only_core=first),
        "ZENFLOW_KERNELS must be": CannotBuild(environment={"ZENFLOW_KERNELS": "none"}),
    }
    case = Case(model_options={"shapes": TINY}, fails=True).with_keys(worker_cores=[first, second])
    runs = run_on_ranks({str(i): dataclasses.replace(case, callbacks=(b,)) for i, b in enumerate(breaks.values())})
    for message, (other, failed) in zip(breaks, runs.values(), strict=True):
        assert failed.error is not None and other.error is not None
        assert re.search(f"Error: .*{message}", failed.error)
        assert re.search(f"Error: rank 1: .*{message}", other.error)


class ReadsOfDeviceValues(TorchDispatchMode):
    """Counts the operations by which the host learns a tensor's value, and for which it would have to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.operations += 1
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal")):
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "torch" not in f.filename]
            self.reads.append(f"{name} from {frames[-1]}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_a_step_reads_nothing_from_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and optimizer step of all steps after the selection, provisional updates and weight prediction included."""
    # Those for a GPU; where the device is the CPU there is nothing to wait for.
    monkeypatch.setattr("lightning_zenflow.zero.build.kernels_for", lambda device: Kernels())
    mode = ReadsOfDeviceValues()

    class Watched(LinearLossModule):
        @override
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with mode if self.trainer.global_step >= 2 else contextlib.nullcontext():
                super().optimizer_step(*args, **kwargs)

    model = Watched(shapes=TINY, accumulate=options.get("accumulate_grad_batches", 1))
    fit(model, ZenFlowStrategy(select_interval=0), steps=10, **options)
    assert mode.operations > 100
    assert mode.reads == []
    with mode:
        torch.ones(1).item()
    assert len(mode.reads) == 1
