"""What is damaged, incomplete or no checkpoint of this model is refused by name."""

import os
import random
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_leaves

from checkpoint_files import MODEL_FILE, RANK_FILE, change_byte, edit
from harness import Case, run_here
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.checkpoint.single_file import FILE_KEY
from lightning_zenflow.offload.run_state import VERSION
from models import SHAPES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, beside which is a file, `a.ckpt`."""
    path = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    run_here(Case(steps=2, save_at=2, checkpoint=str(path)))
    file = Case(steps=2, save_at=2, checkpoint=str(path.with_name("a.ckpt"))).with_keys(checkpoint_format="lightning")
    run_here(file)
    return path


def truncate(name: str, share: float) -> tuple[Callable[[Path], None], str]:
    return lambda path: os.truncate(path / name, int(share * (path / name).stat().st_size)), f"{name}: {DAMAGED}"


def of_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return edit(RANK_FILE, lambda content: change(content["optimizer_state_dict"]))


DAMAGED = "this file is truncated or damaged"
NO_FOLDER = "the path must be a file, or a folder of DeepSpeed with its file `latest`, got neither"


def test_a_part_of_a_checkpoint_is_refused(saved: Path) -> None:
    for part, message in (("checkpoint", NO_FOLDER), (MODEL_FILE, "the file must have an entry 'state_dict', got")):
        with pytest.raises(CheckpointError, match=message):
            run_here(Case(steps=4, checkpoint=str(saved / part)))


@pytest.mark.parametrize("n", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_single_byte(n: int, saved: Path, tmp_path: Path) -> None:
    """Changes single bytes of all files of a checkpoint, one at a time; each time it is what was saved, or refused by the file's name."""
    path = shutil.copytree(saved, tmp_path / "a.ckpt")

    def read() -> list[Any]:
        checkpoint = SavedCheckpoint(path)
        checkpoint.verify_model()
        checkpoint.verify_optimizer([0])
        content = [checkpoint.model_states, checkpoint.optimizer_state(0)]
        return [leaf if isinstance(leaf, torch.Tensor) else repr(type(leaf)) for leaf in tree_leaves(content)]

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
                for a, b in zip(read(), expected, strict=True):
                    assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
            except CheckpointError as error:
                assert str(error).startswith(f"checkpoint {path}")
                assert file.name in str(error), f"{file.name}, byte {position}: {error}"
                n_refused += 1
            file.write_bytes(original)
    assert n_refused > n / 5


def move_class(path: Path) -> None:
    """Gives the checkpoint a hyperparameter of a class that its module has not any more when it is loaded."""
    module = types.ModuleType("old_module")
    vars(module)["Moved"] = moved = type("Moved", (), {"__module__": "old_module"})
    with patch.dict(sys.modules, old_module=module):
        edit(MODEL_FILE, lambda content: content.update(hyper_parameters={"a": moved()}))(path)


def wrong_model(**entries: Any) -> Callable[[Path], None]:
    return edit(MODEL_FILE, lambda content: content.update(entries))


def transpose(entries: dict[str, torch.Tensor], key: str) -> None:
    entries[key] = entries[key].flatten(1).T.contiguous()


def of_adamw(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the optimizer's state in a file."""
    return edited(lambda content: change(content["optimizer_states"][0]))


ANOTHER = "the model must be the saved one: "
edited = partial(edit, "")
"""A change of a file's content."""
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, NO_FOLDER),
    "empty directory": (lambda p: (shutil.rmtree(p), p.mkdir()), NO_FOLDER),
    "no folder": (
        lambda p: (p / "latest").write_text("other"),
        "a file is missing .*: other/mp_rank_00_model_states.pt",
    ),
    "a long name": (lambda p: (p / "latest").write_text("c" * 300), "a file is missing .*: c{300}/"),
    "a name that is none": (lambda p: (p / "latest").write_bytes(b"\0\xff"), "a file is missing .*: "),
    "its own folder": (lambda p: (p / "latest").write_text("/"), "a file is missing .*: mp_rank_00_model_states.pt"),
    "no model": (lambda p: (p / MODEL_FILE).unlink(), f"a file is missing .*: {MODEL_FILE}"),
    "no rank": (lambda p: (p / RANK_FILE).unlink(), f"rank 0 of 1 must have one file .*, {RANK_FILE}, got 0"),
    "half a model file": truncate(MODEL_FILE, 0.5),
    "empty rank file": truncate(RANK_FILE, 0),
    "nearly a rank file": truncate(RANK_FILE, 0.9999),
    "other sizes": (
        of_state(lambda state: state["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(3))),
        r"flat buffer 0 must have 3 elements of each state, got \(\d+, 3, \d+\)",
    ),
    "another precision": (
        lambda p: (p / RANK_FILE).rename(p / RANK_FILE.replace("zero_", "bf16_zero_")),
        f"must have one file for this run's precision, {RANK_FILE}, got 0",
    ),
    "another layout": (
        of_state(lambda state: state["zenflow"].update(version=1)),
        f"the layout must be {VERSION}, got 1: another version of lightning-zenflow wrote the checkpoint; continue with",
    ),
    "another file of torch": (lambda p: torch.save([1], p / MODEL_FILE), ""),
    "no optimizer": (lambda p: torch.save({"a": 1}, p / RANK_FILE), ""),
    "another optimizer": (
        of_state(lambda state: state["base_optimizer_state"]["state"][1].pop("exp_avg_sq")),
        r"its content cannot be loaded \(KeyError: 'exp_avg_sq'\)",
    ),
    "an elastic checkpoint": (of_state(lambda state: state.update(base_optimizer_state=[])), ""),
    "optimizer, no groups": (of_state(lambda s: s["base_optimizer_state"].pop("param_groups")), ""),
    "model, ranks": (wrong_model(dp_world_size="two"), ""),
    "optimizer, layout": (of_state(lambda s: s["zenflow"].pop("layout")), ""),
    "optimizer, columns": (of_state(lambda s: s["zenflow"].update(ownership={})), ""),
    "model, shapes": (wrong_model(param_shapes=[None, None]), ""),
    "model, weights": (wrong_model(module=None), ""),
    "a class that has moved": (move_class, f"/{MODEL_FILE}: .*old_module.*must be importable"),
    "no training": (wrong_model(param_shapes=None), "must have optimizer state, got one that was saved without"),
    "file, a byte": (lambda p: change_byte(p, p.stat().st_size // 2, 255), "truncated or damaged"),
    "file, no checkpoint": (lambda p: torch.save([1], p), "must be a checkpoint of Lightning, got a list"),
    "file, no weights": (edited(lambda c: c.pop("state_dict")), "must have an entry 'state_dict', got epoch"),
    "file, another model": (edited(lambda c: c["state_dict"].popitem()), f"(?s:{ANOTHER}.*Missing key)"),
    # With as many elements each.
    "file, another shape": (
        edited(lambda c: [transpose(c["state_dict"], k) for k, v in c["state_dict"].items() if v.dim() > 1]),
        f"(?s:{ANOTHER}.*size mismatch)",
    ),
    "file, a moment of another shape": (
        of_adamw(lambda s: transpose(s["state"][0], "exp_avg")),
        r"must have the state of AdamW or Adam for \[.*\], got moments of .*exp_avg': \[",
    ),
    "file, groups of other sizes": (
        of_adamw(lambda s: s["param_groups"][1]["params"].insert(0, s["param_groups"][0]["params"].pop())),
        r"must have groups of \[.*\] parameters as saved, got \[",
    ),
    "file, another optimizer": (
        of_adamw(lambda s: s["state"][1].pop("exp_avg_sq")),
        r"must have the state of AdamW or Adam for .*, got moments of {'exp_avg': \[.*\]}",
    ),
    # As NAdam and RAdam.
    "file, other options": (
        of_adamw(lambda s: [s["param_groups"][0].pop(option, 0) for option in ("amsgrad", "bias_correction")]),
        "parameter group 0 must be one of AdamW or Adam, got the options .*betas",
    ),
    "file, amsgrad": (
        of_adamw(lambda s: s["param_groups"][1].update(amsgrad=True)),
        "parameter group 1: amsgrad must be False, got True",
    ),
    "file, another version": (
        edited(lambda c: c[FILE_KEY]["ranks"][0].update(version=0)),
        "another version of lightning-zenflow wrote",
    ),
}


OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_options": {"shapes": (*SHAPES[:2], (53, 8), *SHAPES[3:])}},
        r"the model must be the saved one: weights.2 in parameter group 0 must be \[53, 7\], got \[53, 8\]",
    ),
    ({"model_options": {"shapes": SHAPES[:-1]}}, r"weights.6 in parameter group 0 must be \[.*\], got absent"),
    ({"model": "OneGroup"}, "configure_optimizers must return the saved number of parameter groups, 2, got 1"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, saved: Path, tmp_path: Path) -> None:
    damage, message = REFUSED[name]
    path = tmp_path / "a.ckpt"
    if name.startswith("file, "):
        shutil.copy(saved.with_name("a.ckpt"), path)
    else:
        shutil.copytree(saved, path)
    damage(path)
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}") as caught:
        run_here(Case(steps=4, checkpoint=str(path)))
    # torch's own list of what does not fit is longer.
    assert len(str(caught.value)) < 500 or ANOTHER in message


@pytest.mark.parametrize("stage", [2, 3])
def test_another_model(stage: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    case = Case(steps=2, save_at=2, checkpoint=str(path), stage=stage)
    run_here(case)
    for changes, message in OTHER_MODELS:
        with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}"):
            run_here(replace(case, steps=4, save_at=0, **changes))
