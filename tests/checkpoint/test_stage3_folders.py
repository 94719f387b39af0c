"""Folders of plain DeepSpeed's stage 3: any number of ranks, to stage 2 and to another stage 3; and from stage 2 to stage 3.

Each number of ranks is one set of processes, since starting them takes seconds.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.fabric import Fabric

from checkpoint_files import edit
from harness import EVERYTHING, Case, Run, make_trainer, run_here, snapshot, untrained
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy
from lightning_zenflow.zero.flat_layout import PieceLayout
from rank_processes import run_on_ranks
from same_bits import assert_same_state, assert_same_tensors
from stage3_runs import INITIAL_SCALE_POWER, PiecesNet

SAVED, STEPS = 4, 9
SMALL: dict[str, Any] = {"sub_group_size": 30, "stage3_param_persistence_threshold": 0}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STAGE_3 = Case(model=PiecesNet, loop="stage 3", stock=True, steps=STEPS)
FOLDERS = {
    # Name: ranks, and the training that saves. The second half of the parameters is persistent, or none is.
    "one": (1, STAGE_3.with_keys(**SMALL, **OFFLOADED)),
    "one bf16": (1, replace(STAGE_3, precision="bf16-true", max_norm=0.5)),
    "two": (2, replace(STAGE_3.with_keys(sub_group_size=30), max_norm=0.5)),
    "two fp16": (2, replace(STAGE_3.with_keys(**SMALL), precision="16-true")),
    "three": (3, STAGE_3.with_keys(**SMALL)),
    "three bf16": (3, replace(STAGE_3.with_keys(**SMALL, **OFFLOADED), precision="bf16-true")),
}
LIMIT: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1, "publish_lag": 0, "loop": "trainer", "stock": False}
"""The settings at which training is AdamW's."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage3")


@pytest.fixture(scope="module")
def saved(folders: Path) -> dict[str, Run]:
    """For each folder the training at the save, and under "..., then" the same one at the end of all steps, without the save."""
    runs: dict[str, Run] = {}
    for ranks in (1, 2, 3):
        cases: dict[str, Case] = {}
        for name, (n_ranks, case) in FOLDERS.items():
            if n_ranks == ranks:
                path = str(folders / f"{name}.ckpt")
                cases[name] = replace(case, steps=SAVED, save_at=SAVED, checkpoint=path)
                cases[f"{name}, then"] = case
        runs |= {name: of_ranks[0] for name, of_ranks in run_on_ranks(cases, ranks=ranks).items()}
    return runs


def under_zenflow(name: str, folders: Path, **changes: Any) -> Case:
    # Every forward pass with the true clip factor.
    options = {"optimizer_in_backward": False}
    case = replace(FOLDERS[name][1], strategy_options=options, checkpoint=str(folders / f"{name}.ckpt"))
    return replace(case, **{**LIMIT, **changes})


def names() -> list[str]:
    model = PiecesNet()
    of_parameters = {id(p): name for name, p in model.named_parameters()}
    return [of_parameters[id(p)] for group in model.parameter_groups() for p in group]


@pytest.mark.parametrize("ranks", [1, 2])
def test_stage_2_continues(ranks: int, saved: dict[str, Run], folders: Path) -> None:
    cases = {name: under_zenflow(name, folders, steps=SAVED) for name in FOLDERS}
    cases |= {f"{name}, then": under_zenflow(name, folders) for name in FOLDERS}
    late = {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1, "strategy_options": EVERYTHING}
    cases["weights are late"] = under_zenflow("two", folders, **late)
    runs = {name: of_ranks[0] for name, of_ranks in run_on_ranks(cases, ranks=ranks).items()}
    for name in FOLDERS:
        ours, theirs = runs[name], saved[name]
        # DeepSpeed counts for each sub-group.
        assert {*theirs.counts} == {*ours.counts}
        assert_same_state(replace(ours, counts=[], skipped=0), replace(theirs, counts=[]))
        assert_same_tensors(ours.weights, theirs.weights)
        assert_same_tensors(list(ours.untrained.values()), list(theirs.untrained.values()))
        exported = get_fp32_state_dict_from_zero_checkpoint(str(folders / f"{name}.ckpt"))
        assert_same_tensors(ours.master, [exported[n].contiguous() for n in names()])
        assert torch.equal(exported["head.weight"].contiguous(), exported["embedding.weight"].contiguous())
        if "fp16" in name:
            assert runs[f"{name}, then"].factors[0] == theirs.factors[0] == 2**-INITIAL_SCALE_POWER
        # Models of 16 bits round what they show.
        atol = 2e-6 if FOLDERS[name][1].dtype == torch.float32 else 2e-3
        for a, b in zip(runs[f"{name}, then"].master, saved[f"{name}, then"].master, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_another_stage_3_continues(saved: dict[str, Run], folders: Path) -> None:
    """DeepSpeed itself loads what the reader has cut for it, on two ranks, from folders of both stages; frozen parameters among it."""
    stage_2 = under_zenflow("two", folders, steps=SAVED, save_at=SAVED, checkpoint=str(folders / "stage 2.ckpt"))
    saved = {**saved, "stage 2": run_here(stage_2)}
    cases: dict[str, Case] = {}
    for name in (*FOLDERS, "stage 2"):
        case = FOLDERS.get(name, FOLDERS["three"])[1].with_keys(sub_group_size=50, reads=True)
        cases[name] = replace(case, steps=SAVED, checkpoint=str(folders / f"{name}.ckpt"))
    for name, (run, *_) in run_on_ranks(cases).items():
        assert run.master, name
        assert_same_state(replace(run, counts=[], skipped=0), replace(saved[name], counts=[], skipped=0))
        assert {*run.counts} == {*saved[name].counts}
        assert_same_tensors(run.weights, saved[name].weights)
        assert_same_tensors(list(run.untrained.values()), list(saved[name].untrained.values()))


@pytest.mark.parametrize("name", ["two", "three bf16"])
def test_evaluation(name: str, saved: dict[str, Run], folders: Path) -> None:
    for function in ("validate", "test", "predict"):
        case = under_zenflow(name, folders)
        model = case.make_model()
        trainer = make_trainer(case.make_strategy(), precision=case.precision, limit_val_batches=1)
        getattr(trainer, function)(model, ckpt_path=case.checkpoint)
        assert_same_tensors(snapshot(model), saved[name].weights)
        assert_same_tensors(list(untrained(model).values()), list(saved[name].untrained.values()))
    # In another precision than that of the folder.
    other = PiecesNet()
    make_trainer(case.make_strategy(), limit_test_batches=1).test(other, ckpt_path=case.checkpoint, verbose=False)
    assert_same_tensors(snapshot(other), [w.float() for w in saved[name].weights])


@pytest.mark.parametrize("trains", [False, True])
def test_under_fabric(trains: bool, saved: dict[str, Run], folders: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(worker_cores=1))
    fabric.launch()
    model = PiecesNet()
    optimizer = torch.optim.AdamW([{"params": group} for group in model.optimized()])
    objects = fabric.setup(model, optimizer) if trains else (fabric.setup(model),)
    rest = fabric.load(folders / "three.ckpt", dict(zip(("model", "optimizer"), objects, strict=False)))
    assert rest["global_step"] == SAVED
    assert_same_tensors(snapshot(model), saved["three"].weights)
    assert_same_tensors(list(untrained(model).values()), list(saved["three"].untrained.values()))
    fabric.strategy.teardown()


def of_rank(rank: int, kind: str) -> str:
    return f"checkpoint/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def of_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return edit(of_rank(1, "optim"), lambda content: change(content["optimizer_state_dict"]))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank's model": (
        lambda p: (p / of_rank(2, "model")).unlink(),
        f"the file of rank 2 of 3 is missing: {of_rank(2, 'model')}",
    ),
    "a rank's optimizer": (
        lambda p: (p / of_rank(1, "optim")).unlink(),
        f"the file of rank 1 of 3 is missing: {of_rank(1, 'optim')}",
    ),
    "both stages": (
        lambda p: shutil.copy(p / of_rank(0, "model"), p / "checkpoint/mp_rank_00_model_states.pt"),
        "must have files of one ZeRO stage, got 2 and 3",
    ),
    "another save": (
        edit(of_rank(1, "model"), lambda content: content.update(global_steps=3)),
        f"{of_rank(1, 'model')}: the files of all ranks must be of one save: global_steps must be 4, got 3",
    ),
    "two precisions": (
        lambda p: shutil.copy(p / of_rank(1, "optim"), p / of_rank(1, "optim").replace("zero_", "bf16_zero_")),
        "the files of rank 1 must have one precision, got bf16 and another",
    ),
    "another number of pieces": (
        of_state(lambda state: state.update(partition_count=2)),
        "must be cut into a piece for each of 3 ranks, got 2",
    ),
    "other places": (
        of_state(lambda state: state.update(ds_zero_partition_groups=[{"families": ["autoep_expert"]}])),
        "must be cut into a piece for each of 3 ranks, got .*autoep_expert",
    ),
    "weights elsewhere": (
        of_state(lambda state: state["fp32_flat_groups"].__setitem__(0, torch.empty(0))),
        r"the sub-groups must have \[.*\] master weights, got \[0, ",
    ),
    "another optimizer": (
        of_state(lambda state: state["optimizer_state_dict"]["state"][1].pop("exp_avg_sq")),
        "sub-group 1 must have the complete state of AdamW or Adam, got no exp_avg_sq",
    ),
    "stage 2's state": (
        of_state(lambda state: state.pop("fp32_flat_groups")),
        "the file must be an optimizer state of ZeRO stage 3",
    ),
    "damaged": (
        lambda p: (p / of_rank(2, "optim")).write_bytes((p / of_rank(2, "optim")).read_bytes()[:-9]),
        f"{of_rank(2, 'optim')}: this file is truncated or damaged",
    ),
}


@pytest.mark.usefixtures("saved", "no_worker_is_left")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folders: Path, tmp_path: Path) -> None:
    damage, message = REFUSED[name]
    path = shutil.copytree(folders / "three.ckpt", tmp_path / "a.ckpt")
    damage(path)
    case = under_zenflow("three", folders, checkpoint=str(path))
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}"):
        make_trainer(case.make_strategy(), limit_test_batches=1).test(case.make_model(), ckpt_path=path)
    if name != "two precisions":
        with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}"):
            run_here(case)


@pytest.mark.usefixtures("saved")
def test_one_file_is_open_at_a_time(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files of other ranks, none is mapped while the next one is read."""
    checkpoint = SavedCheckpoint(folders / "three.ckpt")
    read, states = checkpoint.optimizer_state, []

    def noting(self: SavedCheckpoint, rank: int) -> dict[str, Any]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        states.append(len({line.split()[-1] for line in lines if "optim_states" in line}))
        return read(rank)

    monkeypatch.setattr(SavedCheckpoint, "optimizer_state", noting)
    pieces = checkpoint.weights_for(0, world_size=1)
    assert states == [0, 0, 0]
    layouts = [PieceLayout.of({name: pieces[name].numel()}, n_ranks=1) for name in names()]
    state = checkpoint.state_for(0, layouts, world_size=1)
    # The first rank's stays: it has what all of them have in common.
    assert states[3:] == [0, 1, 1]
    assert not any(w.requires_grad for w in (*pieces.values(), *state["fp32_flat_groups"]))
