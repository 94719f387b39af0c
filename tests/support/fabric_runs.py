"""Runs cases of `harness` in a plain loop under Fabric, step by step as Lightning's Trainer does."""

from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from as_before import assert_as_before, looks
from harness import Case, Run, read_state, snapshot
from lightning_zenflow.fabric import ZenFlowStrategy
from models import TestModule


def launch(*, devices: int = 1, precision: Any = "32-true", accelerator: str = "cpu", **keys: Any) -> Fabric:
    """Fabric, by default on the CPU."""
    strategy = ZenFlowStrategy(**{"worker_cores": 1, **keys})
    fabric = Fabric(accelerator=accelerator, devices=devices, precision=precision, strategy=strategy)
    fabric.launch()
    return fabric


def set_up(model: TestModule, **options: Any) -> tuple[Fabric, Any, Any, Any]:
    """As `launch`, with the model and its optimizer set up: (fabric, model, optimizer, scheduler)."""
    fabric = launch(**options)
    optimizer, scheduler = model.optimizer_and_scheduler()
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    wrapped.mark_forward_method("loss")
    return fabric, wrapped, wrapped_optimizer, scheduler


def train_step(
    fabric: Fabric, model: Any, optimizer: Any, step: int, *, accumulate: int = 1, max_norm: float | None = None
) -> list[float]:
    """One step of a `TestModule`; returns the losses of its micro-batches."""
    losses = []
    for micro in range(accumulate):
        with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
            loss = model.loss(step, micro, fabric.global_rank)
            fabric.backward(loss / accumulate)
        # As Lightning reports it: divided by the accumulation.
        losses.append(float(loss.detach() / accumulate) * accumulate)
    if max_norm is not None:
        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[Tensor]]:
    """As `harness.run_case`."""
    run = Run()
    model = case.make_model()
    before = looks(model)
    fabric, wrapped, optimizer, scheduler = set_up(
        model, devices=devices, precision=case.precision, accelerator=case.accelerator, **case.keys()
    )
    strategy = fabric.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    state = {"model": wrapped, "optimizer": optimizer, "step": 0, **({"scheduler": scheduler} if scheduler else {})}
    if case.checkpoint is not None and not case.save_at:
        fabric.load(case.checkpoint, state)
    for step in range(state["step"], case.steps):
        run.shown.append(snapshot(model))
        run.losses.append(
            train_step(fabric, wrapped, optimizer, step, accumulate=case.accumulate, max_norm=case.max_norm)
        )
        if scheduler is not None:
            scheduler.step()
        state["step"] = step + 1
        if step + 1 in case.flush_after:
            strategy.flush()
        if step + 1 == case.save_at:
            assert case.checkpoint is not None
            fabric.save(case.checkpoint, state)
    strategy.flush()
    run.weights = snapshot(model)
    strategy.teardown()
    assert_as_before(before, model)
    return run, read_state(run, strategy.zenflow_optimizer)
