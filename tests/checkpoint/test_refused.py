"""What is damaged, incomplete or no checkpoint of this model is refused by name."""

import os
import random
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from checkpoint_files import MODEL_FILE, RANK_FILE, change_byte, edit
from harness import Case, run_here
from lightning_zenflow.checkpoint.reader import CheckpointError, SavedCheckpoint
from lightning_zenflow.step.run_state import VERSION


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    run_here(Case(steps=2, save_at=2, checkpoint=str(path)))
    return path


def truncate(name: str, share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, int(share * (path / name).stat().st_size))


def without_moments(content: dict[str, Any]) -> None:
    del content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"]


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing there": (shutil.rmtree, "the path must exist"),
    "empty directory": (
        lambda p: (shutil.rmtree(p), p.mkdir()),
        "must be a checkpoint of DeepSpeed, got one without the file `latest`",
    ),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "the path must be a directory .*, got a file"),
    "no folder": (
        lambda p: (p / "latest").write_text("other"),
        "the folder 'other', named by its file `latest`, is missing",
    ),
    "no model": (
        lambda p: (p / MODEL_FILE).unlink(),
        "the file mp_rank_00_model_states.pt is missing: the checkpoint is incomplete",
    ),
    "no rank": (lambda p: (p / RANK_FILE).unlink(), f"the file of rank 0 of 1 is missing: {RANK_FILE}"),
    "stage 3": (
        lambda p: (p / MODEL_FILE).rename(p / "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "the ZeRO stage must be 1 or 2, got 3",
    ),
    "empty model file": (truncate(MODEL_FILE, 0), f"{MODEL_FILE}: this file is truncated or damaged"),
    "half a model file": (truncate(MODEL_FILE, 0.5), f"{MODEL_FILE}: this file is truncated or damaged"),
    "empty rank file": (truncate(RANK_FILE, 0), f"{RANK_FILE}: this file is truncated or damaged"),
    "half a rank file": (truncate(RANK_FILE, 0.5), f"{RANK_FILE}: this file is truncated or damaged"),
    "nearly a rank file": (truncate(RANK_FILE, 0.9999), f"{RANK_FILE}: this file is truncated or damaged"),
    "text": (lambda p: (p / RANK_FILE).write_text("hello world"), f"{RANK_FILE}: this file is truncated or damaged"),
    "another file of torch": (lambda p: torch.save([1], p / MODEL_FILE), "must be a model file of DeepSpeed's engine"),
    "another optimizer": (
        edit(RANK_FILE, without_moments),
        "parameter group 1 must have the complete state of AdamW or Adam, got no exp_avg_sq",
    ),
    "no optimizer": (lambda p: torch.save({"a": 1}, p / RANK_FILE), "must be an optimizer state of ZeRO stage 1 or 2"),
    "another precision": (
        lambda p: (p / RANK_FILE).rename(p / RANK_FILE.replace("zero_", "bf16_zero_")),
        "the precision must be that of the checkpoint, bf16, got another",
    ),
    "another layout": (
        edit(RANK_FILE, lambda content: content["optimizer_state_dict"]["zenflow"].update(version=1)),
        f"the layout must be {VERSION}, got 1: another version of lightning-zenflow wrote the checkpoint; continue with",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved, path)
    damage(path)
    with pytest.raises(CheckpointError, match=rf"^checkpoint {path}.*{message}"):
        SavedCheckpoint(path).model_states and SavedCheckpoint(path).optimizer_state(0, bf16=False)


def check_single_bytes(saved: Path, path: Path, n: int) -> None:
    """Changes single bytes of all files of a checkpoint, one at a time; each time it is what was saved, or refused by the file's name."""

    def read() -> list[Any]:
        checkpoint = SavedCheckpoint(path)
        checkpoint.verify_model()
        checkpoint.verify_optimizer([0], bf16=False)
        states = checkpoint.model_states
        sizes = [flat.numel() for flat in checkpoint.optimizer_state(0, bf16=False)["single_partition_of_fp32_groups"]]
        content = [states, checkpoint.state_for(0, sizes, world_size=1, bf16=False)]
        return [leaf if isinstance(leaf, torch.Tensor) else repr(type(leaf)) for leaf in tree_leaves(content)]

    shutil.copytree(saved, path)
    expected = read()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rng = random.Random(20261124)
    n_refused = 0
    for file in files:
        original = file.read_bytes()
        for i in range(-(-n // len(files))):
            # Every second position is near an end of the file, where its structure is.
            near = rng.randrange(min(4096, len(original)))
            position = [rng.randrange(len(original)), near, len(original) - 1 - near][i % 3]
            change_byte(file, position, original[position] ^ rng.randrange(1, 256))
            try:
                assert_same_content(read(), expected)
            except CheckpointError as error:
                assert str(error).startswith(f"checkpoint {path}")
                assert file.name in str(error), f"{file.name}, byte {position}: {error}"
                n_refused += 1
            file.write_bytes(original)
    assert n_refused > n / 5


def assert_same_content(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def test_any_single_byte(saved: Path, tmp_path: Path) -> None:
    check_single_bytes(saved, tmp_path / "a.ckpt", 60)


@pytest.mark.slow
def test_two_thousand_single_bytes(saved: Path, tmp_path: Path) -> None:
    check_single_bytes(saved, tmp_path / "a.ckpt", 2000)


@pytest.mark.parametrize("content", ["", "c" * 300, "/", "checkpoint\0", "../..", "\udcff", "checkpoint/"])
def test_nonsense_in_latest(content: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    (path / "latest").write_bytes(content.encode(errors="surrogateescape"))
    try:
        assert SavedCheckpoint(path).model_states
    except CheckpointError as error:
        assert str(error).startswith(f"checkpoint {path}") and len(str(error)) < 400


class Moved:
    """A class that the module of this test has when a checkpoint is saved, and not any more when it is loaded."""


@pytest.mark.parametrize("gone", ["module", "class"])
def test_a_hyperparameter_whose_class_has_moved(
    gone: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    module = types.ModuleType("old_module")
    module.Moved = Moved  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "old_module", module)
        patch.setattr(Moved, "__module__", "old_module")
        edit(MODEL_FILE, lambda content: content.update(hyper_parameters={"a": Moved()}))(path)
    if gone == "class":
        del module.Moved
        monkeypatch.setitem(sys.modules, "old_module", module)
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}/{MODEL_FILE}: .*old_module.*must be importable"):
        run_here(Case(steps=4, checkpoint=str(path)))


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "optimizer, no groups": lambda c: c["optimizer_state_dict"]["base_optimizer_state"].pop("param_groups"),
    "optimizer, a list": lambda c: c["optimizer_state_dict"].update(
        base_optimizer_state={"param_groups": [], "state": []}
    ),
    "optimizer, other sizes": lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
        exp_avg=torch.zeros(3)
    ),
    "optimizer, no stage": lambda c: c["optimizer_state_dict"].pop("zero_stage"),
    "optimizer, layout": lambda c: c["optimizer_state_dict"]["zenflow"].pop("layout"),
    "optimizer, columns": lambda c: c["optimizer_state_dict"]["zenflow"].update(ownership={}),
    "model, ranks": lambda c: c.update(dp_world_size="two"),
    "model, shapes": lambda c: c.update(param_shapes=[None, None]),
    "model, steps": lambda c: c.pop("global_steps"),
    "model, weights": lambda c: c.update(module=None),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("no_worker_is_left")
def test_content_that_is_not_what_it_must_be(name: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    edit(MODEL_FILE if name.startswith("model") else RANK_FILE, WRONG[name])(path)
    assert_refused(Case(steps=4, checkpoint=str(path)), f"^checkpoint {path}")


@pytest.mark.parametrize("part", ["checkpoint", RANK_FILE])
def test_a_part_of_a_checkpoint_is_refused(part: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=f"must be a whole checkpoint, got a part: use {saved}$"):
        SavedCheckpoint(saved / part)


def assert_refused(case: Case, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        run_here(case)


@pytest.mark.usefixtures("no_worker_is_left")
def test_another_model_is_refused(saved: Path) -> None:
    here = Case(steps=4, checkpoint=str(saved))
    shapes = {"shapes": ((31, 29), (8, 3, 3, 5), (53, 8), (37,), (3, 211), (1,), (5, 2, 2))}
    assert_refused(
        replace(here, model_options=shapes),
        rf"checkpoint {saved}: the model must be the saved one: parameter group 0 must have weights.2 \[53, 7\], got"
        r" weights.2 \[53, 8\]",
    )
    fewer = {"shapes": ((31, 29), (8, 3, 3, 5), (53, 7), (37,), (3, 211), (1,))}
    assert_refused(
        replace(here, model_options=fewer),
        rf"checkpoint {saved}: parameter group 0 must have 5 parameters, got 4: weights.6 only in the checkpoint",
    )
    assert_refused(
        replace(here, model="OneGroup"),
        "configure_optimizers must return the saved number of parameter groups, 2, got 1",
    )
