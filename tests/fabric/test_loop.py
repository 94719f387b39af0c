"""A plain loop under Fabric trains the Trainer's weights, bit for bit (on two ranks: test_ranks; resumed: test_checkpoint);
what it may do, what it sees, and the errors that name what it must not do.
"""

import copy
import copyreg
import gc
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from as_before import assert_as_before, looks
from fabric_runs import launch, set_up, train_step
from harness import EVERYTHING, PLACES, Case, run_here, snapshot, workers
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.fabric import ZenFlowStrategy
from lightning_zenflow.step_meter import METRICS
from models import OptimizerOptions
from networks import SmallNet
from same_bits import assert_same_run, assert_same_tensors
from side_by_side import HOW, LATE


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture
def loop(request: pytest.FixtureRequest) -> Any:
    """A `SmallNet` under Fabric after two steps, with late weights or other keys: (fabric, model, optimizer)."""
    fabric, model, optimizer, _ = set_up(SmallNet(), **getattr(request, "param", LATE))
    request.addfinalizer(fabric.strategy.teardown)
    for step in range(2):
        train_step(fabric, model, optimizer, step)
    return fabric, model, optimizer


def test_steps_that_are_dropped_or_end_early_and_exact_weights(loop: Any) -> None:
    fabric, model, optimizer = loop
    assert not optimizer.training.steps.is_exact
    before = copies(model)
    assert optimizer.training.steps.is_exact
    fabric.backward(model.loss(2, 0, 0))
    fabric.clip_gradients(model, optimizer, max_norm=1e-3)
    optimizer.zero_grad()
    with fabric.no_backward_sync(model):
        fabric.backward(model.loss(2, 0, 0))
    optimizer.zero_grad()
    assert_same_tensors(copies(model), before)
    with pytest.raises(RuntimeError, match="optimizer.step must come after"):
        optimizer.step()
    # As at the end of an epoch whose last micro-batches are too few.
    with fabric.no_backward_sync(model):
        fabric.backward(model.loss(2, 0, 0))
    norms = [float(fabric.clip_gradients(model, optimizer, max_norm=norm)) for norm in (1.0, float("inf"))]
    assert norms[0] == norms[1] > 0
    optimizer.step()
    # The smaller one, but not that of the dropped step.
    assert optimizer.clip_grad == 1.0
    optimizer.zero_grad()
    assert optimizer.training.steps.number == 3
    model.eval()
    with torch.no_grad():
        model.loss(0, 0, 0)
    assert optimizer.training.steps.is_exact
    model.train()
    train_step(fabric, model, optimizer, 3)
    assert not optimizer.training.steps.is_exact
    optimizer.state_dict()
    assert optimizer.training.steps.is_exact


def test_metrics(loop: Any, tmp_path: Path) -> None:
    """In a loop that goes on with a checkpoint."""
    fabric, model, optimizer = loop
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    fabric.strategy.teardown()
    fabric, model, optimizer, _ = set_up(SmallNet(), **LATE)
    fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    strategy = fabric.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    assert strategy.metrics() == {} and strategy.summary() is None
    for step in range(6):
        train_step(fabric, model, optimizer, step, accumulate=2)
    metrics = strategy.metrics()
    assert {"zenflow/stall/device_percent", "zenflow/overlap/step_ms"} <= metrics.keys()
    assert metrics.keys() <= METRICS.keys()
    assert strategy.metrics() == {}
    assert "update_interval=4, publish_lag=1" in (strategy.summary() or "")
    strategy.teardown()


def test_weights_without_the_optimizer_and_other_objects(loop: Any, tmp_path: Path) -> None:
    """Of a checkpoint, and raw ones, from which training goes on."""
    fabric, model, optimizer = loop
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer, "step": 2, "note": "two"})
    saved = copies(model)
    weight = next(model.module.parameters())
    moments = safe_get_full_optimizer_state(weight, "exp_avg").clone()
    train_step(fabric, model, optimizer, 2)
    state = {"model": model, "step": 0}
    rest = fabric.load(tmp_path / "checkpoint", state)
    assert (state["step"], rest["note"]) == (2, "two")
    assert_same_tensors(copies(model), saved)
    assert not torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), moments)
    with pytest.raises(ValueError, match="the path must be a file, or a folder of DeepSpeed"):
        fabric.load(tmp_path / "nowhere", {"model": model, "optimizer": optimizer})
    raw = {name: 2 * value for name, value in model.state_dict().items()}
    torch.save(raw, tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    train_step(fabric, model, optimizer, 3)
    assert all((w - raw[name]).abs().max() < 0.1 for name, w in model.state_dict().items())
    with pytest.raises(MisconfigurationException, match="obj must be the model"):
        fabric.load_raw(tmp_path / "raw.pt", optimizer)


@pytest.mark.parametrize("format_", ["deepspeed", "lightning"])
def test_an_entry_that_the_checkpoint_does_not_have(format_: Any, tmp_path: Path) -> None:
    """Is an error, as under Fabric for one device, or stays where `strict` is false."""
    fabric, model, optimizer, _ = set_up(SmallNet(), **LATE, checkpoint_format=format_)
    fabric.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "step": 2})
    state = {"model": model, "optimizer": optimizer, "step": 0, "best": 7}
    with pytest.raises(CheckpointError, match="must have an entry 'best', got .*step"):
        fabric.load(tmp_path / "a", state)
    fabric.load(tmp_path / "a", state, strict=False)
    assert (state["step"], state["best"]) == (2, 7)
    if format_ == "deepspeed":
        with pytest.raises(CheckpointError, match="weights_only must be false for a folder"):
            fabric.load(tmp_path / "a", state, strict=False, weights_only=True)
    fabric.strategy.teardown()


@pytest.mark.parametrize("loop", [LATE, HOW["in host memory"]], indirect=True, ids=["late", "in host memory"])
def test_a_teacher_beside_the_model(loop: Any, tmp_path: Path) -> None:
    """It is in the end what it was before, as the model is in `fabric_runs.run_case`."""
    fabric, model, optimizer = loop
    module, _ = linear()
    before, weights = looks(module), copies(module)
    teacher = fabric.setup_module(module)
    assert teacher(torch.ones(1, 3)).shape == (1, 3)
    fabric.save(tmp_path / "one", {"model": model})
    for save_or_load in (fabric.save, fabric.load):
        with pytest.raises(MisconfigurationException, match="one model that was set up, under one name, got 2"):
            save_or_load(tmp_path / "one", {"model": model, "again": model})
    loss = model.loss(2, 0, 0)
    with pytest.raises(ValueError, match="provide the model"):
        fabric.backward(loss)
    with pytest.raises(RuntimeError, match="model must be the one that was set up with the optimizer"):
        fabric.backward(loss, model=teacher)
    fabric.backward(loss, model=model)
    optimizer.step()
    fabric.strategy.teardown()
    assert_as_before(before, module)
    assert_same_tensors(copies(module), weights)


def test_an_interrupted_backward_pass_ends_training_but_not_the_exact_state(loop: Any) -> None:
    fabric, model, optimizer = loop

    def fail(gradient: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.module.embedding.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fabric.backward(model.loss(2, 0, 0))
    handle.remove()
    interrupted = "an error has interrupted a backward pass"
    assert_refused(
        (lambda: fabric.backward(model.loss(2, 0, 0)), f"fabric.backward: {interrupted}"),
        (lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0), f"fabric.clip_gradients: {interrupted}"),
        (optimizer.step, f"optimizer.step: {interrupted}"),
    )
    assert model.state_dict() and optimizer.training.steps.is_exact


def assert_refused(*calls: tuple[Callable[[], object], str]) -> None:
    for call, message in calls:
        with pytest.raises((RuntimeError, MisconfigurationException), match=message):
            call()


def test_misuse_is_named(loop: Any, tmp_path: Path) -> None:
    fabric, model, optimizer = loop
    clip = partial(fabric.clip_gradients, model, optimizer)
    again = "between fabric.backward and optimizer.step"
    assert_refused(
        (lambda: clip(clip_val=1.0), "clip_val must be absent under ZenFlow"),
        (lambda: clip(max_norm=0.0), "max_norm must be a number > 0, got 0.0"),
        (lambda: clip(max_norm=1.0, norm_type="inf"), "norm_type must be 2"),
        (lambda: clip(max_norm=1.0), "fabric.clip_gradients must come after"),
        (optimizer.step, "optimizer.step must come after"),
        (lambda: optimizer.step(lambda: None), "without arguments under ZenFlow, got closure"),
        (lambda: fabric.setup(*linear()), "one model with an optimizer, got a second one"),
    )
    fabric.save(tmp_path / "before", {"model": model, "optimizer": optimizer})
    first, second = model.loss(2, 0, 0), model.loss(2, 1, 0)
    fabric.backward(first)
    assert_refused(
        (lambda: model.loss(2, 1, 0), "must not be read between backward and step.*fabric.no_backward_sync"),
        (lambda: fabric.backward(second), "fabric.backward was called twice in a step"),
        (lambda: fabric.load(tmp_path / "before", {"model": model, "optimizer": optimizer}), again),
        (model.state_dict, again),
        (optimizer.state_dict, again),
        (fabric.strategy.flush, again),
        (lambda: fabric.save(tmp_path / "c", {"model": model}), again),
    )
    optimizer.step()
    assert_refused((lambda: fabric.backward(model.loss(3, 0, 0)), r"`optimizer.zero_grad\(\)` must come before"))
    optimizer.zero_grad()
    second = model.loss(3, 1, 0)
    with fabric.no_backward_sync(model):
        fabric.backward(model.loss(3, 0, 0))
    clip(max_norm=1.0)
    assert_refused((lambda: fabric.backward(second), "or after clipping"), (model.state_dict, again))
    optimizer.step()


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(3, 3)
    return module, torch.optim.AdamW(module.parameters())


def test_settings_models_and_optimizers_are_refused_by_name() -> None:
    fabric = launch()
    sparse = nn.Embedding(3, 3, sparse=True)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert_refused(
        (lambda: fabric.setup(*linear(), other), "must have one optimizer, got 2"),
        (lambda: fabric.setup(sparse, torch.optim.AdamW(sparse.parameters())), "sparse must be"),
        (lambda: ZenFlowStrategy({"gradient_accumulation_steps": 4}), "use `fabric.no_backward_sync"),
        (
            lambda: Fabric(strategy=ZenFlowStrategy(), plugins=[Precision()]),
            "must be a DeepSpeedPrecision, got Precision",
        ),
        (lambda: ZenFlowStrategy({"optimizer": {"type": "AdamW"}}), "optimizer must be absent with Fabric"),
    )
    with pytest.raises(RuntimeError, match=r"`ZenFlowStrategy` requires .* `.setup\(model, optimizer, ...\)`"):
        fabric.setup_optimizers(other)
    assert workers() == []


def of_process() -> tuple[Any, ...]:
    """What trainings change of it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: os.environ.get(name) for name in names}
    return dict(copyreg.dispatch_table), torch.get_num_threads(), nn.functional.linear, variables


ORDERS = ("first, collected, last", "last, first, collected", "collected, last, first")


@pytest.mark.parametrize(
    ("stage", "order"),
    [*(("stage 3", order) for order in ORDERS), ("stage 2", ORDERS[2]), ("in host memory", ORDERS[1])],
)
def test_trainings_that_overlap_end_in_any_order(stage: str, order: str) -> None:
    """By their teardown or the garbage collector. Those that are left go on, and the last one leaves the process as it was."""
    torch.set_num_threads(2)
    gc.collect()  # of tests before
    before = of_process()
    runs = {}
    for name in ("first", "collected", "last"):
        fabric = launch(**PLACES[stage])
        runs[name] = (fabric, *fabric.setup(*linear()))
    del fabric
    during = of_process()[2]

    def go_on(fabric: Fabric, model: Any, optimizer: Any) -> None:
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
        twins = copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))
        assert_same_tensors(*map(copies, twins))
        assert [*map(torch.Tensor.size, copies(twins[0]))] == [(3, 3), (3,)]

    for name in order.split(", "):
        if name == "collected":
            del runs[name]
            gc.collect()
        else:
            runs.pop(name)[0].strategy.teardown()
        for left in runs:
            assert of_process()[2] is during
            go_on(*runs[left])
    assert of_process() == before


BASE = Case(model="SmallNet", steps=9, topk_ratio=0.3)
EXACT = replace(BASE, update_interval=1, publish_lag=0)
DEFAULTS = replace(BASE, update_interval=4, publish_lag=1).with_keys(**EVERYTHING)


@pytest.mark.parametrize(
    ("case", "max_norm"),
    [
        (EXACT, None),
        (DEFAULTS, 0.1),
        (replace(EXACT, precision="16-true"), 0.1),
        (replace(EXACT, precision="bf16-mixed"), 0.1),
        (replace(DEFAULTS, precision="bf16-true"), 0.1),
        (replace(DEFAULTS, precision="16-mixed", stage=3), None),
    ],
    ids=["S=1,d=0", "S=4,d=1", "fp16", "bf16, mixed", "bf16", "fp16, mixed, stage 3"],
)
def test_the_loop_and_the_trainer(case: Case, max_norm: float | None) -> None:
    case = replace(case, max_norm=max_norm, accumulate=2 if max_norm else 1, flush_after=(5,))
    assert_same_run(run_here(replace(case, loop="fabric")), run_here(case))


def test_trainer_and_loop_continue_each_others_checkpoints(tmp_path: Path) -> None:
    """Weights, moments and the schedule, bit for bit; the learning rate of a loop is its own affair, and here constant."""
    case = replace(
        DEFAULTS, optimizer=OptimizerOptions(lr=1e-3, scheduler=False), checkpoint=str(tmp_path / "checkpoint")
    )
    whole = run_here(replace(case, save_at=5))
    fabric, model, optimizer, _ = set_up(case.make_model(), **case.keys())
    rest = fabric.load(case.checkpoint or "", {"model": model, "optimizer": optimizer})
    assert rest["global_step"] == 5
    for step in range(5, case.steps):
        train_step(fabric, model, optimizer, step)
    fabric.strategy.flush()
    assert_same_tensors(snapshot(model.module), whole.weights)
    fabric.strategy.teardown()


def test_a_loop_that_loads_an_earlier_step_repeats_the_steps_since(tmp_path: Path) -> None:
    """The worker waits for the repeated steps' own words: those of the steps before the load, of the same numbers, are gone."""
    max_norm = 0.1
    case = replace(EXACT, max_norm=max_norm)
    fabric, model, optimizer, scheduler = set_up(case.make_model(), **case.keys())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    shown = []
    for begin in (0, 2):
        for step in range(begin, 5):
            train_step(fabric, model, optimizer, step, max_norm=max_norm)
            scheduler.step()
            if step >= 2:
                shown.append(snapshot(model.module))
            elif step == 1:
                fabric.save(tmp_path / "checkpoint", state)
        if begin == 0:
            fabric.load(tmp_path / "checkpoint", state)
    for first, again in zip(shown[:3], shown[3:], strict=True):
        assert_same_tensors(again, first)
    fabric.strategy.teardown()


def test_the_trainers_own_norm_counts_after_a_resume(tmp_path: Path) -> None:
    case = replace(EXACT, steps=4, checkpoint=str(tmp_path / "checkpoint"))
    run_here(replace(case, max_norm=0.1, save_at=2))
    with_other, without = (run_here(replace(case, max_norm=norm)) for norm in (1e-12, None))
    assert any(not torch.equal(a, b) for a, b in zip(with_other.exp_avg, without.exp_avg, strict=True))
