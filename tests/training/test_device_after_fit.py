"""After training on a recorded device: files that are saved, and where the module is. Its process group refuses tensors of the host."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import At
from checkpoint_files import assert_saved
from fabric_runs import set_up, train_step
from harness import PLACES, Case, run_here
from rank_processes import run_on_ranks
from recorded_device.watch import recorded_device
from stage3_runs import PiecesNet

CASE = Case(model="TiedNet", steps=4, topk_ratio=0, update_interval=1, publish_lag=0, loop="recorded")


def save_afterwards(path: Path, trainer: pl.Trainer) -> None:
    """Saves one file when the parameters have left the device."""
    assert {p.device for p in trainer.lightning_module.parameters()} == {torch.device("cpu")}
    trainer.save_checkpoint(path)


def saving(folder: Path, **options: Any) -> dict[str, tuple[Case, Path]]:
    """Cases that save after fit, by name, each with its file."""
    cases = {}
    for index, (place, keys) in enumerate(PLACES.items()):
        path = folder / f"{index}.ckpt"
        case = replace(CASE, **keys, callbacks=(At("on_fit_end", partial(save_afterwards, path)),))
        cases[place] = case.with_keys(checkpoint_format="lightning", **options), path
    return cases


@pytest.mark.parametrize(
    ("place", "moments"), [("stage 2", "bfloat16"), ("stage 3", "int8"), ("in host memory", "int8")]
)
def test_one_rank_saves_short_moments_after_fit(place: str, moments: str, tmp_path: Path) -> None:
    case, path = saving(tmp_path, moments_dtype=moments)[place]
    run = run_here(case)
    assert_saved(path, run, case)
    assert not run.races


def test_two_ranks_save_a_file_after_fit(tmp_path: Path) -> None:
    saved = saving(tmp_path)
    del saved["stage 3"]
    runs = run_on_ranks({name: case for name, (case, _) in saved.items()})
    for name, (case, path) in saved.items():
        assert_saved(path, runs[name][0], case)
        assert not any(run.races for run in runs[name])


@pytest.mark.parametrize("place", PLACES)
def test_a_module_of_fabric_is_in_one_place(place: str) -> None:
    """Weights, buffers, and with them what a forward pass needs; one that was in host memory stays there."""
    case = replace(CASE, **PLACES[place])
    model = PiecesNet(length=case.steps)
    with recorded_device():
        fabric, wrapped, optimizer, _ = set_up(model, **case.keys())
        train_step(fabric, wrapped, optimizer, 0)
        fabric.strategy.teardown()
        expected = torch.device("cpu") if case.offload_parameters else fabric.strategy.root_device
        assert {t.device for t in (*model.parameters(), *model.buffers())} == {expected}
        assert model.device == expected and model.loss(1, 0, 0).isfinite()
