"""What a loop under Fabric may do, what it sees, and the errors that name what it must not do."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fabric_runs import set_up, train_step
from harness import workers
from lightning_zenflow.fabric import ZenFlowStrategy
from lightning_zenflow.monitor.metrics import METRICS
from networks import SmallNet
from processes import is_alive, wait_for
from same_bits import assert_same_tensors

LATE = {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1}


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture
def loop(request: pytest.FixtureRequest, no_worker_is_left: None) -> Any:
    """A `SmallNet` under Fabric after two steps: (fabric, model, optimizer)."""
    fabric, model, optimizer, _ = set_up(SmallNet(), **LATE)
    request.addfinalizer(fabric.strategy.teardown)
    for step in range(2):
        train_step(fabric, model, optimizer, step)
    return fabric, model, optimizer


def test_clipping_returns_the_norm_and_acts_on_the_step() -> None:
    fabric, model, optimizer, _ = set_up(
        SmallNet(), precision="32-true", topk_ratio=0, update_interval=1, publish_lag=0
    )
    plain = SmallNet()
    for step in range(3):
        plain.loss(step, 0, 0).backward()
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        fabric.backward(model.loss(step, 0, 0))
        torch.testing.assert_close(fabric.clip_gradients(model, optimizer, max_norm=1e-3), theirs)
        weights = [p.detach().clone() for p in plain.parameters()]
        optimizer.step()
        assert optimizer.clip_grad == 1e-3
        plain.zero_grad()
        plain.load_state_dict(model.state_dict())
        assert any(not torch.equal(a, b) for a, b in zip(weights, plain.parameters(), strict=True))
    fabric.strategy.teardown()


def test_steps_that_are_dropped_or_end_early_and_exact_weights(loop: Any) -> None:
    fabric, model, optimizer = loop
    assert not optimizer.zenflow_step.is_exact
    before = copies(model)
    assert optimizer.zenflow_step.is_exact
    fabric.backward(model.loss(2, 0, 0))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
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
    assert float(fabric.clip_gradients(model, optimizer, max_norm=1.0)) > 0
    optimizer.step()
    assert optimizer.zenflow_step.number == 3
    model.eval()
    with torch.no_grad():
        model.loss(0, 0, 0)
    assert optimizer.zenflow_step.is_exact
    model.train()
    train_step(fabric, model, optimizer, 3)
    assert not optimizer.zenflow_step.is_exact
    optimizer.state_dict()
    assert optimizer.zenflow_step.is_exact


def test_metrics_and_timeline(tmp_path: Path, no_worker_is_left: None) -> None:
    path = tmp_path / "logs" / "timeline.json"
    fabric, model, optimizer, _ = set_up(SmallNet(), **LATE, timeline=path, timeline_steps=[3, 4])
    strategy = fabric.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    assert strategy.metrics() == {} and strategy.summary() is None
    for step in range(6):
        train_step(fabric, model, optimizer, step, accumulate=2)
    metrics = strategy.metrics()
    assert {"zenflow/stall/device_percent", "zenflow/overlap/step_ms", "zenflow/traffic/d2h_GB_per_s"} <= metrics.keys()
    assert metrics.keys() <= METRICS.keys()
    assert strategy.metrics() == {}
    assert "update_interval=4, publish_lag=1" in (strategy.summary() or "")
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"step 3", "step 4", "forward", "backward"} <= names
    strategy.teardown()


def test_raw_weights_become_the_master_weights(loop: Any, tmp_path: Path) -> None:
    fabric, model, optimizer = loop
    other = SmallNet()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    torch.save(other.state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert_same_tensors(copies(model), copies(other))
    train_step(fabric, model, optimizer, 2)
    assert all((p - q).abs().max() < 0.1 for p, q in zip(copies(model), copies(other), strict=True))
    with pytest.raises(MisconfigurationException, match="obj must be the model"):
        fabric.load_raw(tmp_path / "raw.pt", optimizer)


def test_weights_without_the_optimizer_and_other_objects(loop: Any, tmp_path: Path) -> None:
    fabric, model, optimizer = loop
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer, "step": 2, "note": "two"})
    saved = copies(model)
    moments = optimizer.optimizer.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    train_step(fabric, model, optimizer, 2)
    state = {"model": model, "step": 0}
    rest = fabric.load(tmp_path / "checkpoint", state)
    assert (state["step"], rest["note"]) == (2, "two")
    assert_same_tensors(copies(model), saved)
    assert not torch.equal(optimizer.optimizer.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    with pytest.raises(ValueError, match="the path must exist"):
        fabric.load(tmp_path / "nowhere", {"model": model, "optimizer": optimizer})


def test_a_teacher_beside_the_model(loop: Any) -> None:
    fabric, model, optimizer = loop
    teacher = fabric.setup_module(nn.Linear(3, 2))
    assert teacher(torch.ones(1, 3)).shape == (1, 2)
    loss = model.loss(2, 0, 0)
    with pytest.raises(ValueError, match="provide the model"):
        fabric.backward(loss)
    with pytest.raises(RuntimeError, match="model must be the one that was set up with the optimizer"):
        fabric.backward(loss, model=teacher)
    fabric.backward(loss, model=model)
    optimizer.step()


def test_an_interrupted_backward_pass_ends_training_but_not_the_exact_state(loop: Any) -> None:
    fabric, model, optimizer = loop

    def fail(gradient: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.module.embedding.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fabric.backward(model.loss(2, 0, 0))
    handle.remove()
    further = {
        "fabric.backward": lambda: fabric.backward(model.loss(2, 0, 0)),
        "fabric.clip_gradients": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0),
        "optimizer.step": optimizer.step,
    }
    for name, call in further.items():
        with pytest.raises(RuntimeError, match=f"{name}: an error has interrupted a backward pass"):
            call()
    assert model.state_dict() and optimizer.zenflow_step.is_exact


def test_misuse_is_named(loop: Any, tmp_path: Path) -> None:
    fabric, model, optimizer = loop
    for arguments, message in [
        ({"clip_val": 1.0}, "clip_val must be absent under ZenFlow"),
        ({"max_norm": 0.0}, "max_norm must be a number > 0, got 0.0"),
        ({"max_norm": 1.0, "norm_type": "inf"}, "norm_type must be 2"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            fabric.clip_gradients(model, optimizer, **arguments)
    with pytest.raises(RuntimeError, match="fabric.clip_gradients must come after"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="optimizer.step must come after"):
        optimizer.step()
    with pytest.raises(MisconfigurationException, match="without arguments under ZenFlow, got closure"):
        optimizer.step(lambda: None)
    with pytest.raises(MisconfigurationException, match="one model with an optimizer, got a second one"):
        second = nn.Linear(2, 2)
        fabric.setup(second, torch.optim.AdamW(second.parameters()))
    fabric.backward(model.loss(2, 0, 0))
    with pytest.raises(RuntimeError, match="fabric.backward was called twice in a step"):
        fabric.backward(model.loss(2, 1, 0))
    reads = (
        model.state_dict,
        optimizer.state_dict,
        fabric.strategy.flush,
        lambda: fabric.save(tmp_path / "c", {"model": model}),
    )
    for read in reads:
        with pytest.raises(RuntimeError, match="between fabric.backward and optimizer.step"):
            read()
    optimizer.step()
    with fabric.no_backward_sync(model):
        fabric.backward(model.loss(3, 0, 0))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="or after `fabric.clip_gradients`"):
        fabric.backward(model.loss(3, 1, 0))
    with pytest.raises(RuntimeError, match="between fabric.backward and optimizer.step"):
        model.state_dict()
    optimizer.step()


def linear(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(3, 3)
    return module, torch.optim.AdamW(module.parameters(), **options)


def test_models_and_optimizers_are_refused_by_name() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ZenFlowStrategy(worker_cores=1))
    fabric.launch()
    sparse = nn.Embedding(3, 3, sparse=True)
    for arguments, message in [
        ((*linear(), torch.optim.AdamW([nn.Parameter(torch.ones(1))])), "must have one optimizer, got 2"),
        (linear(amsgrad=True), "amsgrad must be False"),
        ((sparse, torch.optim.AdamW(sparse.parameters())), "sparse must be"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            fabric.setup(*arguments)
    assert workers() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_ration": 0.1}, "topk_ratio"),
        ({"config": {"gradient_accumulation_steps": 4}}, "use `fabric.no_backward_sync"),
        ({"config": {"optimizer": {"type": "AdamW"}}}, "optimizer must be absent with Fabric"),
        ({"config": {"zero_optimization": {"stage": 3}}}, "zero_optimization.stage must be 2"),
    ],
)
def test_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ZenFlowStrategy(**options)


def test_the_worker_ends_with_what_refers_to_it_and_another_training_begins(no_worker_is_left: None) -> None:
    for _ in range(2):
        fabric = Fabric(accelerator="cpu", devices=1, strategy="zenflow")
        assert isinstance(fabric.strategy, ZenFlowStrategy)
        fabric.launch()
        model, optimizer = fabric.setup(*linear())
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        assert len(workers()) == 1
        del fabric, model, optimizer
        gc.collect()
        assert workers() == []


def test_a_script_that_tears_nothing_down_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from fabric_runs import set_up, train_step
from harness import workers
from networks import SmallNet

fabric, model, optimizer, _ = set_up(SmallNet(), update_interval=4, publish_lag=1)
for step in range(3):
    train_step(fabric, model, optimizer, step)
fabric.print("worker", *workers())
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("worker")]
    wait_for(lambda: not is_alive(int(line.split()[1])))
