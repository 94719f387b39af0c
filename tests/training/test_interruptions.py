"""An exception at any line of backward, step and flush: the exact state is whole, or said to be lost, and training can go on."""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from checkpoint_files import zero_state
from direct_step import DirectStep, direct_step
from eventful_training import random_tensors
from fabric_runs import set_up, train_step
from harness import Case, fit, run_here, state_of, workers
from interrupts import Interrupt, strides, sweep
from lightning_zenflow.worker.process import SupervisedWorker, WorkerError
from models import TINY, LinearLossModule
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device
from scripted_schedule import scripted

# An interrupt in a generator that is being freed is lost, as Ctrl-C would be.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPES = ((40, 64), (5,), (17, 70))
"""Of four blocks where weights are in place."""
CASES: dict[str, dict[str, Any]] = {
    "S=1, d=0": {"update_interval": 1, "publish_lag": 0},
    "S=4, d=1": {"update_interval": 4, "publish_lag": 1, "select_interval": 0, "topk_ratio": 0.3},
}
DIRECT: dict[str, dict[str, Any]] = {
    **CASES,
    # The interrupted steps select.
    "selecting": {**CASES["S=4, d=1"], "select_interval": 3},
    "true factors": {**CASES["S=1, d=0"], "clip_prediction": False},
    "in place": {"in_place": True},
    "half resident": {**CASES["S=1, d=0"], "offload_ratio": 0.5},
    "half resident, S=4, d=1": {**CASES["S=4, d=1"], "offload_ratio": 0.5},
    "freezing": CASES["S=4, d=1"],
    "moves of owners": {"update_interval": "auto", "publish_lag": 0, "clip_prediction": False},
}
"""Where DeepSpeed has no part."""
EXACT = {"update_interval": 1, "publish_lag": 0, "overlap_step": False, "topk_ratio": 0.0}
BEFORE = 3
"""Steps before each interrupted one, so that windows are open and jobs in flight."""
MOVES = ((2, 1, 0, 0.3), (BEFORE + 1, 1, 0, 0.8))
"""As `auto` decides: (step, S, d, share that the device owns behind it). The last of them is interrupted."""
random = functools.partial(random_tensors, shapes=SHAPES)


def train(direct: DirectStep) -> None:
    """One step; its gradients are a function of the steps before. Every third one is clipped."""
    direct.training.max_norm = 3.0 if int(direct.step.count) % 3 == 0 else 1e6
    direct.backward(random(100 + int(direct.step.count)))
    direct.step.step()


class Twins:
    """A training that is interrupted, and one with the same gradients and without moves that is not."""

    def __init__(self, name: str) -> None:
        self._name, (self._first, *others) = name, map(nn.Parameter, random(0))
        with ExitStack() as undo:
            if name == "moves of owners":
                undo.enter_context(scripted(MOVES))
            of_both = ([self._first, *others], DIRECT[name]), (random(0), EXACT)
            self._direct, self._control = (
                undo.enter_context(direct_step([values], loss_scale=4.0, **keys)) for values, keys in of_both
            )
            self.close = undo.pop_all().close

    def interrupt(self, context: Interrupt) -> str:
        """Interrupts a step and the flush after it, and between them moves to the device and back, or changes of what is trained, which are
        undone; then flushes. Returns how it ended. If whole, the control has the same bits.
        """
        direct, control, moves = self._direct, self._control, self._name == "moves of owners"
        for _ in range(BEFORE):
            train(direct)
        count = int(direct.step.count)
        context.records = direct.parts.rank.records
        with context:
            train(direct)
            if moves:
                direct.parts.moves.give_back(1, direct.step.count)
                train(direct)
                direct.training.give_back()
            for trains in (False, True) if self._name == "freezing" else ():
                self._first.requires_grad_(trains)
                direct.step.follow_freezing()
            direct.step.flush()
        self._first.requires_grad_(True)
        try:
            direct.step.flush()
        except WorkerError as error:
            assert "the exact optimizer state is lost" in str(error)
            assert not direct.step.is_exact
            return "lost"
        assert count <= int(direct.step.count) <= count + 1 + moves
        direct.step.follow_freezing()
        for _ in range(1 + moves):
            assert direct.step.is_exact and direct.count == int(direct.step.count)
            while int(control.step.count) < direct.count:
                train(control)
            control.step.flush()
            assert all(map(torch.equal, direct.state(), control.state()))
            # Others go on with the next interrupt.
            if moves:
                train(direct)
                direct.step.flush()
        return "whole"


@pytest.mark.parametrize("name", DIRECT)
@strides(60, 1)
def test_whole_or_said_to_be_lost(name: str, stride: int) -> None:
    twins, moves = [Twins(name)], name == "moves of owners"

    def interrupted(context: Interrupt) -> str:
        outcome = twins[-1].interrupt(context)
        # Moves are of a training's first steps.
        if outcome == "lost" or moves:
            twins.pop().close()
            twins.append(Twins(name))
        return outcome

    try:
        # Most of the lines of these two are others', too.
        stride *= 4 if moves or name == "freezing" else 1
        assert sweep(interrupted, stride=stride) > 1000 / stride
    finally:
        twins.pop().close()


FIT = Case(steps=8, model_options={"shapes": TINY}, max_norm=1.0)
STEP = 4
"""Step of a fit that is interrupted, counted from 1."""


class Interrupted(LinearLossModule):
    """Interrupts an optimizer step, its closure with the backward pass included, and the flush of a validation after it."""

    context: Interrupt

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step + 1 < STEP:
            super().optimizer_step(*args, **kwargs)
            return
        self.context.records = self.trainer.strategy.zenflow_optimizer.training.parts.rank.records
        with self.context:
            super().optimizer_step(*args, **kwargs)
            self.trainer.strategy.flush()
        # Where the context ends the exception, as at the end of a callback of the user's.
        raise KeyboardInterrupt


@functools.cache
def masters(name: str, steps: int) -> Tensor:
    """Master weights after a number of steps of `FIT`, uninterrupted; its gradients do not depend on the weights."""
    run = run_here(replace(FIT, steps=steps, loop="direct").with_keys(**CASES[name]))
    return torch.cat([w.flatten() for w in run.master])


def interrupted_fit(name: str, path: Path, context: Interrupt) -> str:
    """Interrupts a fit that saves a checkpoint then; returns how it ended."""
    model = Interrupted(shapes=TINY)
    model.context = context
    callback = ModelCheckpoint(dirpath=path, filename="a", every_n_train_steps=1000, save_on_exception=True)
    options = {"gradient_clip_val": FIT.max_norm, "enable_checkpointing": True, "callbacks": [callback]}
    with pytest.raises(SystemExit):
        fit(model, FIT.with_keys(**CASES[name]).make_strategy(), steps=FIT.steps, **options)
    assert workers() == []
    saved = list(path.glob("*.ckpt"))
    if not saved:
        return "lost"
    state = zero_state(saved[0])
    count = int(state["base_optimizer_state"]["state"][0]["step"])
    assert count in (STEP - 1, STEP)
    saved_masters = torch.cat([flat.detach() for flat in state["single_partition_of_fp32_groups"]])
    assert torch.equal(saved_masters, masters(name, count))
    return "whole"


@pytest.mark.parametrize("name", CASES)
@strides(120, 30)
def test_a_fit_that_saves_on_exceptions(name: str, stride: int, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(10_000))
    assert sweep(lambda context: interrupted_fit(name, next(folders), context), stride=stride) > 0


def loop(name: str, context: Interrupt | None) -> Tensor | None:
    """Interrupts `optimizer.step()` in a loop under Fabric, which goes on; returns the master weights, None where they are lost."""
    keys = FIT.with_keys(**CASES[name]).keys()
    fabric, model, optimizer, scheduler = set_up(LinearLossModule(shapes=TINY), **keys)
    step = optimizer.training.steps
    try:
        while (done := int(step.count)) < FIT.steps:
            # Of the steps that were applied, interrupted or not.
            while scheduler.last_epoch < done:
                scheduler.step()
            if context is None or done + 1 < STEP:
                train_step(fabric, model, optimizer, done, max_norm=FIT.max_norm)
                continue
            fabric.backward(model.loss(done, 0, 0))
            context.records = optimizer.training.parts.rank.records
            with context:
                fabric.clip_gradients(model, optimizer, max_norm=FIT.max_norm)
                optimizer.step()
                fabric.strategy.flush()
            context = None
            optimizer.zero_grad()
        fabric.strategy.flush()
        flats = zip(optimizer.single_partition_of_fp32_groups, model.parameters(), strict=True)
        return torch.cat([flat.detach()[: p.numel()] for flat, p in flats])
    except WorkerError as error:
        assert "the exact optimizer state is lost" in str(error)
        return None
    finally:
        fabric.strategy.teardown()


@pytest.mark.parametrize("name", CASES)
@strides(120, 30)
def test_a_loop_that_goes_on(name: str, stride: int) -> None:
    def interrupted(context: Interrupt) -> str:
        found = loop(name, context)
        assert found is None or torch.equal(found, masters(name, FIT.steps))
        return "lost" if found is None else "whole"

    assert sweep(interrupted, stride=stride) > 0


def test_a_write_to_exact_weights_is_not_lost() -> None:
    """Where the forward pass is interrupted that looks for it."""
    fabric, model, optimizer, _ = set_up(LinearLossModule(shapes=TINY), **CASES["S=1, d=0"])
    (weights, *_), value = model.parameters(), 0.0

    def interrupted(context: Interrupt) -> str:
        nonlocal value
        value += 1
        train_step(fabric, model, optimizer, 0)
        fabric.strategy.flush()
        with torch.no_grad():
            weights.fill_(value)
        with context:
            model.loss(0, 0, 0)
        fabric.strategy.flush()
        model.loss(0, 0, 0)
        written = safe_get_full_fp32_param(weights)
        assert written is not None and (written == value).all() and (weights == value).all()
        return "whole"

    assert sweep(interrupted, stride=4) > 0
    fabric.strategy.teardown()


def steps(direct: DirectStep, numbers: Sequence[int], *, first: int = 0) -> None:
    """Steps, or backward passes of steps that are interrupted: the gradients of the parameters before `first` never come."""
    for number in numbers:
        gradients = random(number, DEVICE)
        for index in reversed(range(first, len(gradients))):
            direct.receive(index, gradients[index], last=True)
        direct.join()
        if first == 0:
            direct.step.step()


@pytest.mark.parametrize(("s", "d"), [(1, 0), (4, 1)])
def test_interrupted_backward_passes(s: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no slot and change nothing; what comes after them is in order on a device that runs behind.

    Weights were read again after an interruption, and the worker waits for the same words again.
    """
    # No answer comes in backward, so that its copies are left to the flush.
    monkeypatch.setattr(SupervisedWorker, "has_answered", lambda *_: False)
    keys = {"topk_ratio": 0, "weight_prediction": 0, "provisional_scale": 0, "update_interval": s, "publish_lag": d}
    states = []
    for interrupted in (range(0), range(100, 120)):
        with recorded_device() as device, direct_step([random(0, DEVICE)], **keys) as direct:
            # With a lag, a block of the last parameter is due in the first step that is interrupted.
            steps(direct, range(1, 8))
            for number in interrupted:
                steps(direct, [number], first=1)
                if d > 0:
                    direct.shown[0].clone()
                direct.step.flush()
            direct.step.flush()
            steps(direct, range(8, 11))
            direct.step.flush()
            states.append(state_of(direct.parts.rank.arena))
        assert not device.order.races
    # The host's own writes of words are in no order that the device would record.
    assert "jobs._forget_words" in {o.place for o in device.order.operations if o.kind == "host wait"}
    assert all(map(torch.equal, *states))
