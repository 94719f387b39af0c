"""Memory that leaves the device between steps (`engine.offload_states`) and comes back (`engine.reload_states`)."""

import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fabric_runs import set_up, train_step
from harness import EVERYTHING, Case, run_here, snapshot
from lightning_zenflow.kernels.base import NOISE_NUMEL
from networks import SmallNet
from rank_processes import run_each
from recorded_device.watch import recorded_device
from same_bits import assert_same_run, assert_same_tensors
from sleeps import Behind, Sleeps
from stage3_runs import PiecesNet

LATE = Case(model="SmallNet", precision="bf16-true", topk_ratio=0.3, max_norm=0.1).with_keys(**EVERYTHING)
IN_BACKWARD = replace(LATE, update_interval=1, publish_lag=0, max_norm=None)
CASES = {
    f"{name}, stage {stage}": replace(case, stage=stage)
    for name, case in {"S=1, d=0": IN_BACKWARD, "S=4, d=1": LATE}.items()
    for stage in (2, 3)
}
CASES["half resident, stage 2"] = IN_BACKWARD.with_keys(offload_ratio=0.5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_state_are_those_without(ranks: int) -> None:
    """One of three sleeps is in the middle of a step. Where weights are late, a flush takes the place of each."""
    cases: dict[str, Case] = {}
    for name, case in CASES.items():
        case, batches = replace(case, model=PiecesNet, accumulate=2), (6, 9, 12)
        cases[name] = replace(case, callbacks=(Sleeps(batches),))
        cases[f"{name}, without"] = replace(case, callbacks=(Behind(batches),) if case.publish_lag else ())
    runs = run_each(cases, ranks=ranks)
    for name in CASES:
        for ours, theirs in zip(runs[name], runs[f"{name}, without"], strict=True):
            assert_same_run(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_memory_leaves_and_all_is_ordered(name: str) -> None:
    """On a device that runs behind the host."""
    widths = [64] * 8
    case = replace(CASES[name], model="Perceptron", model_options={"widths": widths}, recorded=False, max_norm=None)
    asleep: list[int] = []
    with recorded_device() as device:
        sleeps = Sleeps((3, 6), asleep=lambda _: asleep.append(device.memory.total), pin_memory=name in [*CASES][::2])
        run_here(replace(case, callbacks=(sleeps,)))
    weights = 2 * sum(m * n + n for m, n in itertools.pairwise(widths))
    noise = 2 * NOISE_NUMEL * 4
    assert not device.order.races
    assert len(asleep) == 2 and max(asleep) < noise + weights / 8


@pytest.fixture(params=[2, 3], ids=["stage 2", "stage 3"])
def loop(request: pytest.FixtureRequest) -> tuple[Any, Any, Any, Any]:
    """Fabric, model, optimizer, and DeepSpeed's engine, after two steps with late weights."""
    fabric, model, optimizer, _ = set_up(SmallNet(), **{**LATE.keys(), "stage": request.param})
    request.addfinalizer(fabric.strategy.teardown)
    for step in range(2):
        train_step(fabric, model, optimizer, step)
    return fabric, model, optimizer, fabric.strategy.model


def test_no_training_goes_on(loop: Any, tmp_path: Path) -> None:
    """And it may not begin between backward and step."""
    fabric, model, optimizer, engine = loop
    fabric.backward(model.loss(2, 0, 0))
    with pytest.raises(MisconfigurationException, match="behind the step"):
        engine.offload_states()
    optimizer.step()
    loss = model.loss(2, 0, 0)
    engine.offload_states()
    fabric.save(tmp_path / "checkpoint", state := {"model": model, "optimizer": optimizer})
    refused: list[Callable[[], object]] = [
        lambda: model.loss(2, 0, 0),
        lambda: fabric.backward(loss),
        lambda: engine.optimizer.step(),
        lambda: fabric.load(tmp_path / "checkpoint", state),
        lambda: model.eval().loss(2, 0, 0),
    ]
    for call in refused:
        with pytest.raises(MisconfigurationException, match="call `engine.reload_states"):
            call()


@pytest.mark.parametrize("in_reload", [False, True], ids=["offload", "reload"])
@pytest.mark.parametrize("name", ["resize_", "copy_"])
def test_an_interrupted_call_is_undone(loop: Any, name: str, in_reload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first storage that it has to do with."""
    fabric, model, optimizer, engine = loop
    fabric.strategy.flush()
    before, original = snapshot(model.module), getattr(torch.UntypedStorage, name)

    def interrupted(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    if in_reload:
        engine.offload_states()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.UntypedStorage, name, interrupted)
        (engine.reload_states if in_reload else engine.offload_states)()
    with pytest.raises(MisconfigurationException, match="call `engine.reload_states"):
        model.loss(2, 0, 0)
    engine.reload_states()
    assert_same_tensors(snapshot(model.module), before)
    train_step(fabric, model, optimizer, 2)


def test_what_is_included_leaves(loop: Any) -> None:
    _, _, _, engine = loop
    (weights, *_) = engine.optimizer.training.parts.rank.weights
    engine.offload_states(include=[OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states])
    train_step(*loop[:3], 2)
    engine.offload_states(include=[OffloadStateTypeEnum.contiguous_grad_buffer])
    assert weights.untyped_storage().nbytes()
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
    assert not weights.untyped_storage().nbytes()
    engine.offload_states()
    engine.reload_states()
    engine.reload_states()
    train_step(*loop[:3], 3)


def test_weights_in_host_memory(loop: Any) -> None:
    """They are read and written there, and what is written counts from then on, as between two steps; a training may end so.

    Files have no more than before.
    """
    fabric, model, _, engine = loop
    fabric.strategy.flush()
    before = snapshot(model.module)
    engine.offload_states()
    assert_same_tensors(snapshot(model.module), before)
    parameters = list(model.module.parameters())
    with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        parameters[0].fill_(0.5)
    engine.reload_states()
    model.loss(2, 0, 0)
    assert safe_get_full_fp32_param(parameters[0]).eq(0.5).all()
    written = snapshot(model.module)
    assert_same_tensors(written[1:], before[1:])
    name, weight = next(iter(model.state_dict().items()))
    if weight.numel():
        torch.save({name: weight}, file := io.BytesIO())
        assert len(file.getvalue()) < weight.nbytes + 2500
    engine.offload_states()
    fabric.strategy.teardown()
    assert_same_tensors(snapshot(model.module), written)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
