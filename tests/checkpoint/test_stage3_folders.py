"""Folders of stage 3, of plain DeepSpeed and of this package, on any number of ranks; those of the other stage are refused. Content that
is damaged in any folder: test_refused, and on two ranks test_checkpoint_safety.

Each number of ranks is one set of processes, since starting them takes seconds.
"""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import utils
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from callbacks import At
from checkpoint_files import assert_continues, edit, in_order
from fabric_runs import launch, set_up
from harness import EVERYTHING, Case, Run, make_trainer, run_here, snapshot, untrained
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.deepspeed.flat_buffers import Layout
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import assert_same_state, assert_same_tensors
from stage3_runs import INITIAL_SCALE_POWER, PiecesNet

SAVED, STEPS = 4, 9
SMALL: dict[str, Any] = {"sub_group_size": 30, "stage3_param_persistence_threshold": 0}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STAGE_3 = Case(model=PiecesNet, loop="stage 3", stock=True, steps=STEPS)
FOLDERS = {
    # Name: ranks, and the training that saves. The second half of the parameters is persistent, or none is.
    "one bf16": (1, replace(STAGE_3, precision="bf16-true", max_norm=0.5)),
    "two": (2, replace(STAGE_3.with_keys(sub_group_size=30, **OFFLOADED), max_norm=0.5)),
    "two fp16": (2, replace(STAGE_3.with_keys(**SMALL), precision="16-true")),
    "three bf16": (3, replace(STAGE_3.with_keys(**SMALL, **OFFLOADED), precision="bf16-true")),
}
LIMIT: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1, "publish_lag": 0, "loop": "trainer", "stock": False}
"""The settings at which training is AdamW's."""
LATE: dict[str, Any] = {**LIMIT, "topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1}
PIECES = {
    "stage": 3,
    "sub_group_size": 50,
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 100,
}


def in_pieces(case: Case) -> Case:
    """Under stage 3, with sub-groups and persistent parameters of its own."""
    return replace(case, stage=3).with_keys(config={"zero_optimization": PIECES})


ZENFLOW = Case(model=PiecesNet, steps=STEPS, strategy_options=EVERYTHING)
OURS = {
    "ours, one": (1, in_pieces(replace(ZENFLOW, **LATE, precision="bf16-true", max_norm=0.5))),
    "ours, two": (2, in_pieces(replace(ZENFLOW, **LATE))),
}
"""Folders of this package."""
THEN = ("two fp16", "three bf16")
"""Of these plain DeepSpeed's training goes on, and ours from what it has saved."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage3")


@pytest.fixture(scope="module")
def saved(folders: Path) -> Runs:
    """For each folder the training at the save, and under "..., then" the same one at the end of all steps, without the save, or under
    "..., whole" with it.
    """
    all_cases: dict[str, Case] = {}
    runs: dict[str, list[Run]] = {}
    for ranks in (1, 2, 3):
        cases: dict[str, Case] = {}
        for name, (n_ranks, case) in (FOLDERS | OURS).items():
            if n_ranks == ranks:
                path = str(folders / f"{name}.ckpt")
                if name in OURS:
                    cases[f"{name}, whole"] = replace(case, save_at=SAVED, checkpoint=str(folders / "again.ckpt"))
                elif name in THEN:
                    cases[f"{name}, then"] = case
                cases[name] = replace(case, steps=SAVED, save_at=SAVED, checkpoint=path)
        all_cases |= cases
        runs |= run_each(cases, ranks=ranks, here=False).runs
    return Runs(all_cases, runs)


def under_zenflow(name: str, folders: Path, **changes: Any) -> Case:
    # Every forward pass with the true clip factor.
    options = {"overlap_step": False}
    of_folder = (FOLDERS | OURS)[name][1]
    case = replace(of_folder, strategy_options=options, checkpoint=str(folders / f"{name}.ckpt"))
    return in_pieces(replace(case, **{**LIMIT, **changes}))


def double(trainer: pl.Trainer) -> None:
    """Reads the state of single parameters, which another rank may have loaded, and writes to it; in the end it is what it was."""
    for p in trainer.lightning_module.parameters():
        if p.requires_grad:
            master, moment = utils.safe_get_full_fp32_param(p), utils.safe_get_full_optimizer_state(p, "exp_avg")
            for factor in (2, 1):
                utils.safe_set_full_fp32_param(p, factor * master)
                utils.safe_set_full_optimizer_state(p, factor * moment, "exp_avg")
                assert torch.equal(utils.safe_get_full_fp32_param(p), factor * master)
                assert torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), factor * moment)


def assert_loaded(ours: Run, theirs: Run, path: Path) -> None:
    """What a training begins with is what another one had at the save, in a folder."""
    # DeepSpeed counts for each sub-group.
    assert {*theirs.counts} == {*ours.counts}
    assert_same_state(replace(ours, counts=[], skipped=0), replace(theirs, counts=[], skipped=0))
    assert_same_tensors(ours.weights, theirs.weights)
    assert_same_tensors(list(ours.untrained.values()), list(theirs.untrained.values()))
    exported = get_fp32_state_dict_from_zero_checkpoint(str(path))
    assert_same_tensors(ours.master, in_order(STAGE_3, exported))
    assert torch.equal(exported["head.weight"].contiguous(), exported["embedding.weight"].contiguous())


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))], ids=str)
def continued(request: pytest.FixtureRequest, saved: Runs, folders: Path) -> Runs:
    """From every folder, on any number of ranks: what training begins with, and under "..., then" how it goes on."""
    doubled = (At("on_load_checkpoint", double),)
    cases = {name: under_zenflow(name, folders, steps=SAVED, callbacks=doubled) for name in FOLDERS | OURS}
    cases |= {f"{name}, then": under_zenflow(name, folders) for name in THEN}
    cases["weights are late"] = under_zenflow("two", folders, **LATE, strategy_options=EVERYTHING)
    return run_each(cases, ranks=request.param, here=False)


@pytest.mark.parametrize("name", FOLDERS | OURS)
def test_training_continues(name: str, continued: Runs, saved: Runs, folders: Path) -> None:
    assert_loaded(continued[name][0], saved[name][0], folders / f"{name}.ckpt")
    if name in THEN:
        ours, theirs = continued[f"{name}, then"][0], saved[f"{name}, then"][0]
        if "fp16" in name:
            assert ours.factors[0] == saved[name][0].factors[0] == 2**-INITIAL_SCALE_POWER
        # Models of 16 bits round what they show.
        atol = 2e-6 if FOLDERS[name][1].dtype == torch.float32 else 2e-3
        torch.testing.assert_close(ours.master, theirs.master, rtol=0, atol=atol)


def test_late_weights_continue(continued: Runs) -> None:
    assert continued["weights are late"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_many_ranks(ranks: int, saved: Runs, folders: Path) -> None:
    """The same training goes on with the same bits, and plain DeepSpeed loads what this package saved."""
    plain = replace(STAGE_3.with_keys(sub_group_size=50, stage3_param_persistence_threshold=40), steps=SAVED)
    cases: dict[str, Case] = {}
    for name, (n_ranks, case) in OURS.items():
        if n_ranks == ranks:
            path = str(folders / f"{name}.ckpt")
            cases[name] = replace(case, checkpoint=path)
            cases[f"{name}, plain"] = replace(plain, precision=case.precision, checkpoint=path)
    for name, (run, *_) in run_on_ranks(cases, ranks=ranks).items():
        if name in OURS:
            assert_continues(run, saved[f"{name}, whole"][0], SAVED)
        else:
            of_folder = name.removesuffix(", plain")
            assert_loaded(run, saved[of_folder][0], folders / f"{of_folder}.ckpt")


@pytest.mark.parametrize("name", ["three bf16", "ours, two"])
def test_evaluation(name: str, saved: Runs, folders: Path) -> None:
    case = under_zenflow(name, folders)
    for function in ("validate", "test", "predict"):
        model = case.make_model()
        trainer = make_trainer(case.make_strategy(), precision=case.precision, limit_val_batches=1)
        getattr(trainer, function)(model, ckpt_path=case.checkpoint)
        assert_same_tensors(snapshot(model), saved[name][0].weights)
        assert_same_tensors(list(untrained(model).values()), list(saved[name][0].untrained.values()))
    # In another precision than that of the folder.
    other = PiecesNet()
    make_trainer(case.make_strategy(), limit_test_batches=1).test(other, ckpt_path=case.checkpoint, verbose=False)
    assert_same_tensors(snapshot(other), [w.float() for w in saved[name][0].weights])


def test_under_fabric(saved: Runs, folders: Path, tmp_path: Path) -> None:
    model = PiecesNet()
    fabric, wrapped, optimizer, _ = set_up(model, config={"zero_optimization": PIECES})
    rest = fabric.load(folders / "two.ckpt", {"model": wrapped, "optimizer": optimizer})
    assert rest["global_step"] == SAVED
    assert_same_tensors(snapshot(model), saved["two"][0].weights)
    assert_same_tensors(list(untrained(model).values()), list(saved["two"][0].untrained.values()))
    # A file of whole weights.
    other = PiecesNet()
    torch.save({name: 2 * value for name, value in other.state_dict().items()}, tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", wrapped)
    assert_same_tensors(snapshot(model), [2 * w for w in snapshot(other)])
    for p, w in zip((p for group in model.parameter_groups() for p in group), snapshot(other), strict=True):
        assert torch.equal(utils.safe_get_full_fp32_param(p), 2 * w)
    fabric.strategy.teardown()


def of_rank(rank: int, kind: str) -> str:
    return f"checkpoint/{'bf16_' * (kind == 'optim')}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank's model": (
        lambda p: (p / of_rank(2, "model")).unlink(),
        f"rank 2 of 3 must have one file for this run's precision, {of_rank(2, 'model')}, got 0",
    ),
    "a rank's optimizer": (
        lambda p: (p / of_rank(1, "optim")).unlink(),
        f"rank 1 of 3 must have one file for this run's precision, {of_rank(1, 'optim')}, got 0",
    ),
    "another save": (
        edit(of_rank(1, "model"), lambda content: content.update(global_steps=3)),
        f"{of_rank(1, 'model')}: the files of all ranks must be of one save: global_steps must be 4, got 3",
    ),
    "two precisions": (
        lambda p: shutil.copy(p / of_rank(1, "optim"), p / of_rank(1, "optim").replace("bf16_zero_", "zero_")),
        "rank 1 of 3 must have one file for this run's precision, .*, got 2",
    ),
}


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folders: Path, tmp_path: Path) -> None:
    damage, message = REFUSED[name]
    path = shutil.copytree(folders / "three bf16.ckpt", tmp_path / "a.ckpt")
    damage(path)
    case = under_zenflow("three bf16", folders, checkpoint=str(path))
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}"):
        if name in ("a rank's model", "two precisions"):
            make_trainer(case.make_strategy(), limit_test_batches=1).test(case.make_model(), ckpt_path=path)
        else:
            run_here(case)


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_other_stage_is_refused(stage: int, folders: Path, tmp_path: Path) -> None:
    """In training and evaluation, under the Trainer and Fabric."""
    path = folders / "two.ckpt"
    if stage == 3:
        path = tmp_path / "2.ckpt"
        run_here(replace(ZENFLOW, **LIMIT, steps=SAVED, save_at=SAVED, checkpoint=str(path)))
    saved, present = ("1 or 2", "3") if stage == 3 else ("3", "another")
    message = f"^checkpoint {path}: the ZeRO stage must be that of the folder, {saved}, got {present}"
    case = replace(ZENFLOW, **LIMIT, checkpoint=str(path))
    case = in_pieces(case) if stage == 3 else case
    with pytest.raises(CheckpointError, match=message):
        run_here(case)
    with pytest.raises(CheckpointError, match=message):
        make_trainer(case.make_strategy(), limit_test_batches=1).test(case.make_model(), ckpt_path=path)
    fabric = launch(config={"zero_optimization": PIECES if stage == 3 else {}})
    with pytest.raises(CheckpointError, match=message):
        fabric.load(path, {"model": fabric.setup(PiecesNet().eval())})
    fabric.strategy.teardown()


@pytest.mark.usefixtures("saved")
def test_one_file_is_open_at_a_time(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files of other ranks, none is mapped while the next one is read."""
    gc.collect()  # garbage of earlier tests may hold mapped files
    checkpoint = SavedCheckpoint(folders / "three bf16.ckpt")
    read, states = checkpoint.optimizer_state, []

    def noting(self: SavedCheckpoint, rank: int) -> dict[str, Any]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        states.append(len({line.split()[-1] for line in lines if "optim_states" in line}))
        return read(rank)

    monkeypatch.setattr(SavedCheckpoint, "optimizer_state", noting)
    parameters = dict(PiecesNet().named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    pieces = checkpoint.weights_for(0, shapes, world_size=1)
    assert states == [0, 0, 0]
    trained = [name for name, p in parameters.items() if p.requires_grad]
    layouts = [Layout.of_pieces({name: pieces[name].numel()}, n_ranks=1) for name in trained]
    state = checkpoint.state_for(0, layouts, world_size=1)
    # The first rank's stays: it has what all of them have in common.
    assert states[3:] == [0, 1, 1]
    assert not any(w.requires_grad for w in (*pieces.values(), *(masters for masters, *_ in state["partitions"])))
