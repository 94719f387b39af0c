"""An exception at any line of backward, step and flush: the exact state is whole, or said to be lost, and training can go on."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_exact_state import zero_state
from test_step import random
from torch import Tensor
from typing_extensions import override

from direct_step import DirectStep
from fabric_runs import set_up, train_step
from harness import Case, make_trainer, run_here, workers
from interrupts import Interrupt, PassedPlaces
from lightning_zenflow.worker.process import WorkerError
from models import TINY, LinearLossModule
from processes import ArenaWatch

pytestmark = [
    pytest.mark.usefixtures("no_worker_is_left"),
    # An interrupt in a generator that is being freed is lost, as Ctrl-C would be.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CASES: dict[str, dict[str, Any]] = {
    "S=1, d=0": {"update_interval": 1, "publish_lag": 0},
    "S=4, d=1": {"update_interval": 4, "publish_lag": 1, "select_interval": 2, "topk_ratio": 0.3},
}
EXACT = {"update_interval": 1, "publish_lag": 0, "optimizer_in_backward": False, "topk_ratio": 0.0}
BEFORE = 3
"""Steps before each interrupted one, so that windows are open and jobs in flight."""
MOST_LOST = 0.2
"""Share of the lines at which the state may be lost: those of changes of records, during which nothing waits."""


class Twins:
    """A training that is interrupted, and one with the same gradients that is not."""

    def __init__(self, **keys: Any) -> None:
        self.interrupted, self.control = DirectStep(random(0), **keys), DirectStep(random(0), **EXACT)

    def close(self) -> None:
        self.interrupted.close()
        self.control.close()

    def train(self, direct: DirectStep) -> None:
        """One step; its gradients are a function of the steps before."""
        direct.backward(random(100 + int(direct.step.count)))
        direct.step.step()

    def compare(self) -> None:
        """Brings the control up to the same step; then both must have the same bits."""
        ours, theirs = self.interrupted, self.control
        while int(theirs.step.count) < int(ours.step.count):
            self.train(theirs)
        theirs.step.flush()
        assert ours.step.is_exact
        for direct in (ours, theirs):
            assert int(direct.optimizer.state[direct.master]["step"]) == int(ours.step.count)
        assert all(torch.equal(a, b) for a, b in zip(ours.state(), theirs.state(), strict=True))

    def passed(self) -> PassedPlaces:
        """Places of a step and the flush after it, in some steps."""
        with PassedPlaces() as passed:
            self.train(self.interrupted)
            self.interrupted.step.flush()
        return passed

    def interrupt(self, interrupt: Interrupt) -> str:
        """Interrupts a step and the flush after it, then flushes; returns how it ended."""
        direct = self.interrupted
        for _ in range(BEFORE):
            self.train(direct)
        count = int(direct.step.count)
        with interrupt:
            self.train(direct)
            direct.step.flush()
        try:
            direct.step.flush()
        except WorkerError as error:
            assert "the exact optimizer state is lost" in str(error)
            assert not direct.step.is_exact
            return "lost"
        assert int(direct.step.count) in (count, count + 1)
        self.compare()
        return "whole" if interrupt.raised else "not reached"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stride", [40, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_whole_or_said_to_be_lost(name: str, stride: int) -> None:
    counts: Counter[str] = Counter()
    twins = Twins(**CASES[name])
    for _ in range(BEFORE):
        twins.train(twins.interrupted)
    for place, time in twins.passed().times(stride=stride):
        try:
            outcome = twins.interrupt(Interrupt(place, time))
        except Exception as error:
            raise AssertionError(f"interrupted at {place}, time {time}") from error
        counts[outcome] += 1
        if outcome == "lost":
            twins.close()
            twins = Twins(**CASES[name])
    twins.close()
    assert counts["whole"] > 1000 / stride
    assert counts["lost"] <= MOST_LOST * counts["whole"], counts


FIT = Case(steps=8, model_options={"shapes": TINY}, max_norm=1.0)
STEP = 4
"""Step of a fit that is interrupted, counted from 1."""


class Interrupted(LinearLossModule):
    """Interrupts an optimizer step, its closure with the backward pass included, and the flush of a validation after it."""

    context: PassedPlaces
    arena: ArenaWatch

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step + 1 < STEP:
            super().optimizer_step(*args, **kwargs)
            return
        self.arena = ArenaWatch(self.trainer.strategy)
        with self.context:
            super().optimizer_step(*args, **kwargs)
            self.trainer.strategy.flush()
        # Where the context ends the exception, as at the end of a callback of the user's.
        raise KeyboardInterrupt


@functools.cache
def masters(name: str) -> list[list[Tensor]]:
    """Master weights after each number of steps of `FIT`, uninterrupted; its gradients do not depend on the weights."""
    return [run_here(replace(FIT, steps=steps).with_keys(**CASES[name])).master for steps in (STEP - 1, STEP)]


def interrupted_fit(name: str, context: PassedPlaces, path: Path) -> str:
    """Interrupts a fit that saves a checkpoint then; returns how it ended."""
    model = Interrupted(shapes=TINY)
    model.context = context
    callback = ModelCheckpoint(dirpath=path, filename="a", every_n_train_steps=1000, save_on_exception=True)
    trainer = make_trainer(
        FIT.with_keys(**CASES[name]).make_strategy(),
        max_steps=FIT.steps,
        gradient_clip_val=FIT.max_norm,
        enable_checkpointing=True,
        callbacks=[callback],
    )
    with pytest.raises(SystemExit):
        trainer.fit(model)
    assert workers() == []
    # Only exact master weights and moments, if any, and the pages around them.
    assert model.arena.n_bytes <= 12 * sum(p.numel() for p in model.parameters()) + (1 << 18)
    model.arena.close()
    saved = list(path.glob("*.ckpt"))
    if not saved:
        return "lost"
    state = zero_state(saved[0])
    count = int(state["base_optimizer_state"]["state"][0]["step"])
    expected = torch.cat([w.flatten() for w in masters(name)[count - STEP + 1]])
    ours = torch.cat([flat.detach() for flat in state["single_partition_of_fp32_groups"]])
    assert torch.equal(ours, expected)
    return "whole"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stride", [1200, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_fit_that_saves_on_exceptions(name: str, stride: int, tmp_path: Path) -> None:
    passed = PassedPlaces()
    assert interrupted_fit(name, passed, tmp_path / "0") == "whole"
    counts: Counter[str] = Counter()
    for number, (place, time) in enumerate(passed.times(stride=stride), 1):
        try:
            counts[interrupted_fit(name, Interrupt(place, time), tmp_path / str(number))] += 1
        except Exception as error:
            raise AssertionError(f"interrupted at {place}, time {time}") from error
    assert counts["whole"] > 0
    assert counts["lost"] <= MOST_LOST * counts["whole"] + 1, counts


def loop(name: str, context: PassedPlaces | None = None) -> Tensor | None:
    """Interrupts `optimizer.step()` in a loop under Fabric, which goes on; returns the master weights, None where they are lost."""
    keys = FIT.with_keys(**CASES[name]).keys()
    fabric, model, optimizer, scheduler = set_up(LinearLossModule(shapes=TINY), **keys)
    step = optimizer.zenflow_step
    try:
        while (done := int(step.count)) < FIT.steps:
            # Of the steps that were applied, interrupted or not.
            while scheduler.last_epoch < done:
                scheduler.step()
            if context is None or done + 1 < STEP:
                train_step(fabric, model, optimizer, done, max_norm=FIT.max_norm)
                continue
            fabric.backward(model.loss(done, 0, 0))
            with context:
                fabric.clip_gradients(model, optimizer, max_norm=FIT.max_norm)
                optimizer.step()
                fabric.strategy.flush()
            context = None
            if step.is_complete and not step.was_interrupted:
                # Nothing of the step has begun, and a further backward pass is refused.
                optimizer.zero_grad()
        fabric.strategy.flush()
        return torch.cat([flat.detach().clone() for flat in optimizer.single_partition_of_fp32_groups])
    except WorkerError as error:
        assert "the exact optimizer state is lost" in str(error)
        return None
    finally:
        fabric.strategy.teardown()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stride", [700, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_loop_that_goes_on(name: str, stride: int) -> None:
    passed = PassedPlaces()
    expected = loop(name, passed)
    assert expected is not None
    counts: Counter[str] = Counter()
    for place, time in passed.times(stride=stride):
        try:
            masters = loop(name, Interrupt(place, time))
            assert masters is None or torch.equal(masters, expected)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}, time {time}") from error
        counts["lost" if masters is None else "whole"] += 1
    assert counts["whole"] > 0
    assert counts["lost"] <= MOST_LOST * counts["whole"] + 1, counts
