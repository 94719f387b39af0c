"""On a CUDA device: every place of weights and type of moments; files that are saved and the module after fit; Fabric.

    python -m pytest -m gpu tests/gpu/test_gpu_places.py

The same on the CPU is slow (`-m slow`), and shows that nothing but a GPU is missing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import in_order
from fabric_runs import set_up, train_step
from harness import PLACES, Case, make_trainer, run_here
from lightning_zenflow import ZenFlowStrategy
from models import SHAPES
from same_bits import assert_same_state, assert_same_tensors
from stage3_runs import PiecesNet

MOMENTS = ("float32", "bfloat16", "int8")
STEPS, SAVED = 8, 5


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> str:
    """Where it trains."""
    return str(request.param)


def case_of(accelerator: str, place: str, moments: str = "float32", **options: Any) -> Case:
    """AdamW on gradients that do not depend on the weights, so that every place has the same bits."""
    base = {"topk_ratio": 0.0, "update_interval": 1, "publish_lag": 0, "steps": STEPS, "recorded": False}
    case = Case(**{**base, **PLACES[place], **options, "accelerator": accelerator})
    return case.with_keys(moments_dtype=moments, overlap_comm=True)


@pytest.mark.parametrize("place", PLACES)
def test_clipped_with_late_weights(place: str, accelerator: str) -> None:
    """Runs repeat."""
    late = {} if place == "in host memory" else {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1}
    case = case_of(accelerator, place, model="TiedNet", max_norm=0.3, precision="bf16-true", **late)
    if place == "in host memory":
        case = case.with_keys(overlap_step=False)
    assert_same_state(run_here(case), run_here(case))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_file_is_saved_in_and_after_fit_and_goes_on(
    place: str, moments: str, accelerator: str, tmp_path: Path
) -> None:
    """With the bits of stage 2 with every update behind backward; the weights of the module after fit are those of the last step."""
    case = case_of(accelerator, place, moments).with_keys(checkpoint_format="lightning")
    whole = run_here(replace(case, save_at=SAVED, checkpoint=str(tmp_path / "half.ckpt")))
    rest = run_here(replace(case, checkpoint=str(tmp_path / "half.ckpt")))
    assert_same_state(rest, whole)
    assert_same_tensors(whole.weights, whole.master)
    if moments == "float32":
        assert_same_state(whole, run_here(case_of(accelerator, "stage 2").with_keys(overlap_step=False)))
    model = case.make_model()
    trainer = make_trainer(case.make_strategy(), max_steps=SAVED, accelerator=accelerator)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    after, half = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("after", "half"))
    for key, of_file in (("state_dict", lambda c: c), ("optimizer_states", lambda c: c[0]["state"])):
        torch.testing.assert_close(of_file(after[key]), of_file(half[key]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", PLACES)
def test_the_module_can_be_used_after_fit(place: str, accelerator: str) -> None:
    """On the CPU, where Lightning leaves it; then on the device again, evaluated and trained further."""
    case = case_of(accelerator, place)
    model = PiecesNet(length=STEPS)
    make_trainer(case.make_strategy(), max_steps=3, accelerator=accelerator).fit(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.loss(0, 0, 0).isfinite()
    if accelerator == "gpu":
        model.cuda()
        assert model.loss(0, 0, 0).isfinite()
    make_trainer(case.make_strategy(), max_steps=2, accelerator=accelerator).fit(model)


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("place", PLACES)
def test_under_fabric(place: str, moments: str, accelerator: str, tmp_path: Path) -> None:
    """The Trainer's bits, a file, and a module that is in one place at the end.

    Moments are rounded once a job. The first step under Fabric, which may be clipped by any norm, ends the windows of all blocks, and under
    the Trainer those of parameters without a gradient go on. So each of these parameters has one in each step.
    """
    case = case_of(accelerator, place, moments, steps=3, model_options={"shapes": SHAPES[:6]})
    case = case.with_keys(checkpoint_format="lightning")
    model, path = case.make_model(), tmp_path / "a.ckpt"
    fabric, wrapped, optimizer, scheduler = set_up(model, accelerator=accelerator, **case.keys())
    for step in range(case.steps):
        train_step(fabric, wrapped, optimizer, step)
        scheduler.step()
    fabric.save(path, {"model": wrapped, "optimizer": optimizer})
    fabric.strategy.teardown()
    assert len({p.device for p in model.parameters()} | {b.device for b in model.buffers()}) == 1
    saved = torch.load(path, weights_only=True)
    assert_same_tensors(in_order(case, saved["model"]), run_here(case).master)


def test_auto_in_every_place(accelerator: str) -> None:
    """The default keys train, wherever the weights are."""
    for place in PLACES.values():
        case = replace(Case(model="TiedNet", steps=6, accelerator=accelerator, recorded=False), **place)  # type: ignore[arg-type]
        zero = case.zero_3() if case.stage == 3 else {"stage": 2}
        strategy = ZenFlowStrategy({"zero_optimization": zero}, stall_monitor=False)
        model = case.make_model()
        make_trainer(strategy, max_steps=6, accelerator=accelerator).fit(model)
        assert all(p.isfinite().all() for p in model.parameters())
