"""Who wrote a checkpoint, and who reads it: format, number of ranks and stage of ZeRO, this package or plain DeepSpeed. A reader goes on
with the same bits, or begins with exactly the saved state, or refuses the checkpoint by name.

What ranks of one number have written is read by one set of processes, since starting them takes seconds. Other configurations on one
rank: test_checkpoint. Damaged content: test_refused, and on two ranks test_checkpoint_safety.
"""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed import utils
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from callbacks import At, save
from checkpoint_files import RANK_FILE, assert_continues, edit, in_order
from fabric_runs import set_up
from harness import AUTO, EVERYTHING, Case, Run, make_trainer, run_here, snapshot, untrained
from lightning_zenflow.checkpoint.files import CheckpointError
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.checkpoint.single_file import FILE_KEY
from lightning_zenflow.deepspeed.flat_buffers import Layout
from rank_processes import Runs, run_each
from same_bits import assert_same_state, assert_same_tensors
from stage3_runs import INITIAL_SCALE_POWER, PiecesNet

SAVED, STEPS = 4, 9
FILE = {"checkpoint_format": "lightning"}
SAME_DATA = {"ranks_differ": False}
"""On every rank: then the gradient's mean does not depend on how many there are."""
FREEZING = {"frozen_in": {0: (0, 100), 3: (3, 100), 2: (2, 6)}, **SAME_DATA}
"""The first one is frozen from the beginning, and put together from its pieces; one is unfrozen behind the save."""
LATE = Case(model_options=FREEZING, topk_ratio=0.3, max_norm=1.0).with_keys(**EVERYTHING)
LIMIT: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1, "publish_lag": 0, "loop": "trainer", "stock": False}
"""The settings at which training is AdamW's, so that only the order of sums depends on the number of ranks."""
SMALL = Case(model="SmallNet", model_options=SAME_DATA, **LIMIT)
ORDERED, MODULES = (SMALL.with_keys(config={"zero_optimization": {"round_robin_gradients": o}}) for o in (True, False))
"""In both orders of plain DeepSpeed."""
SHORT = replace(SMALL, precision="bf16-true", max_norm=1.0).with_keys(moments_dtype="bfloat16")
AUTOMATIC = Case(topk_ratio=0.3, precision="bf16-true", accumulate=2, max_norm=1.0, schedules=((1, 2, 1),)).with_keys(
    **EVERYTHING, **AUTO
)
# Rank 1 has nothing of the last sub-group, a single element, and finds all its slices where they were.
SINGLE = Case(topk_ratio=0.3, publish_lag=1, stage=3, model_options={"shapes": ((31, 29), (37,), (1,))})
SUB_GROUPS, OTHER_SUB_GROUPS = (
    SINGLE.with_keys(**EVERYTHING, config={"zero_optimization": {"stage": 3, "sub_group_size": n}}) for n in (19, 99)
)
PLAIN_3 = Case(model=PiecesNet, loop="stage 3", stock=True)
PIECES = {"stage": 3, "sub_group_size": 50, "stage3_param_persistence_threshold": 40}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
NOT_PERSISTENT: dict[str, Any] = {"sub_group_size": 30, "stage3_param_persistence_threshold": 0}
OURS_3 = Case(model=PiecesNet, topk_ratio=0.3, update_interval=4, stage=3).with_keys(
    **EVERYTHING, config={"zero_optimization": {**PIECES, "stage3_prefetch_bucket_size": 100}}
)


def register_sparse(trainer: Any) -> None:
    trainer.lightning_module.register_buffer("graph", torch.eye(3).to_sparse())


SPARSE = {"callbacks": (At("setup", register_sparse),)}
WRITERS = {
    # Name: ranks, and the training that saves.
    "bf16": (1, Case(topk_ratio=0.3, precision="bf16-true", model_options=SAME_DATA).with_keys(**EVERYTHING)),
    "file": (1, LATE.with_keys(**FILE)),
    "auto": (2, AUTOMATIC),
    # A folder by default.
    "sub-groups": (2, SUB_GROUPS.with_keys(checkpoint_format="auto")),
    "late": (2, LATE),
    "file of two": (2, replace(LATE, **SPARSE).with_keys(**FILE)),
    "file of stage 3": (2, replace(LATE, stage=3, **SPARSE).with_keys(**FILE)),
    "ordered": (2, ORDERED),
    "plain, ordered": (2, replace(ORDERED, stock=True)),
    "plain, in the module's order": (2, replace(MODULES, stock=True)),
    "short moments": (1, SHORT),
    "plain, bf16": (1, replace(SHORT, stock=True)),
    # The second half of the parameters is persistent, or none is.
    "plain 3, one, bf16": (1, replace(PLAIN_3, precision="bf16-true", max_norm=0.5)),
    "plain 3, two": (2, replace(PLAIN_3.with_keys(sub_group_size=30, **OFFLOADED), max_norm=0.5)),
    "plain 3, two, fp16": (2, replace(PLAIN_3.with_keys(**NOT_PERSISTENT), precision="16-true")),
    "plain 3, three, bf16": (
        3,
        replace(PLAIN_3.with_keys(**NOT_PERSISTENT, **OFFLOADED), precision="bf16-true"),
    ),
    "ours 3, one": (1, replace(OURS_3, precision="bf16-true", max_norm=0.5)),
    "ours 3, two": (2, OURS_3),
}


class Reader(NamedTuple):
    """Who reads what one of `WRITERS` has written, and what is expected.

    "bits": the run goes on as the one that saved; "anew": with another schedule; "exact": it begins with the saved state; "close": it
    goes on as close to the one that saved as `atol`, as do exact ones that have it; "refused": all ranks refuse the other stage.
    """

    writer: str
    ranks: int
    expected: str
    case: Case
    atol: float | None = None
    is_slow: bool = False

    @property
    def name(self) -> str:
        by = "plain " * self.case.stock + f"stage {self.case.stage}"
        return f"{self.writer}, by {self.ranks} of {by}: {self.expected}{', slow' * self.is_slow}"


def by(ranks: int, writer: str, expected: str, atol: float | None = None, **changes: Any) -> Reader:
    return Reader(writer, ranks, expected, replace(WRITERS[writer][1], **changes), atol)


def by_stage_3(ranks: int, writer: str, atol: float | None = None, *, is_slow: bool = False, **changes: Any) -> Reader:
    """With sub-groups and persistent parameters of its own, and the true clip factor in every forward pass."""
    keys = {"strategy_options": {"config": OURS_3.strategy_options["config"], "overlap_step": False}}
    case = replace(WRITERS[writer][1], **{**LIMIT, **keys, "stage": 3, **changes})
    return Reader(writer, ranks, "exact", case, atol, is_slow)


def by_plain_3(ranks: int, writer: str) -> Reader:
    case = PLAIN_3.with_keys(sub_group_size=50, stage3_param_persistence_threshold=40)
    return Reader(writer, ranks, "exact", replace(case, precision=WRITERS[writer][1].precision, stage=3))


GOES_ON = {"plain 3, two, fp16": 2e-3, "plain 3, three, bf16": 2e-3}
"""Models of 16 bits round what they show."""
WITHOUT_OTHERS = {"schedules": ((STEPS + 1, 1, 1),)}
"""The run has the schedule from the checkpoint only."""
OF_STAGE_3 = [name for name, (_, case) in WRITERS.items() if case.model is PiecesNet]
READERS = {
    reader.name: reader
    for reader in (
        by(2, "auto", "bits", **WITHOUT_OTHERS),
        by(2, "auto", "anew", **WITHOUT_OTHERS),
        Reader("sub-groups", 2, "exact", OTHER_SUB_GROUPS, 0.0),
        by(2, "file of two", "bits"),
        by(2, "file of stage 3", "bits"),
        by(1, "late", "exact", 2e-6),
        by(1, "file of two", "exact", 2e-6, stage=3),
        by(1, "file of stage 3", "exact", 2e-6, stage=2),
        by(2, "bf16", "exact", 2e-6),
        by(2, "file", "exact", 2e-6, stage=3),
        by(2, "ordered", "close", 2e-6, stock=True),
        by(1, "short moments", "close", 2e-2, stock=True),
        by(1, "plain, bf16", "exact", 2e-2, stock=False),
        *(Reader(name, 2, "exact", SMALL, 2e-6) for name in ("plain, ordered", "plain, in the module's order")),
        *(by_stage_3(2, name, GOES_ON.get(name)) for name in OF_STAGE_3),
        # Weights are late: each is at most a learning rate a step away.
        by_stage_3(1, "plain 3, two", 0.05, update_interval=4, publish_lag=1, topk_ratio=0.3),
        by(1, "ours 3, one", "bits"),
        by(2, "ours 3, two", "bits"),
        by_plain_3(1, "ours 3, one"),
        by_plain_3(2, "ours 3, two"),
        by(2, "late", "refused", stage=3),
        by(2, "ours 3, two", "refused", stage=2, strategy_options={}),
        *(by_stage_3(ranks, name, is_slow=True) for name in OF_STAGE_3 for ranks in (1, 3)),
        *(by(4, name, "exact", 2e-6)._replace(is_slow=True) for name in ("late", "file of two", "file of stage 3")),
    )
}


class Written:
    """What was written, and what reads it, in a folder; each when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by, self.read = cache(self._by), cache(self._read)

    def path(self, writer: str) -> Path:
        self.by(WRITERS[writer][0])
        return self.folder / f"{writer}.ckpt"

    def _by(self, ranks: int) -> Runs:
        """For each writer on so many ranks the training that ends with the save, and under "..., whole" the one that goes on."""
        cases = {}
        for name, (n_ranks, case) in WRITERS.items():
            if n_ranks == ranks:
                case = replace(case, save_at=SAVED, checkpoint=str(self.folder / f"{name}.ckpt"))
                ends = At("on_train_end", partial(save, self.folder / f"{name}, weights.ckpt", weights_only=True))
                callbacks = case.callbacks if case.stock else (*case.callbacks, ends)
                cases[f"{name}, whole"] = replace(case, steps=STEPS, callbacks=callbacks)
                cases[name] = replace(case, steps=SAVED)
        return run_each(cases, ranks=ranks, here=False)

    def _read(self, by: int, ranks: int, is_slow: bool) -> Runs:
        """For each reader on `ranks` of what was written by other ranks the training, and under "..., loaded" one without a step."""
        cases = {}
        for name, reader in READERS.items():
            if (WRITERS[reader.writer][0], reader.ranks, reader.is_slow) == (by, ranks, is_slow):
                path = self.path(reader.writer)
                if reader.expected == "anew":
                    path = shutil.copytree(path, self.folder / "anew.ckpt")
                    # One rank alone finds another partition.
                    edit(f"checkpoint/bf16_{Path(RANK_FILE).name}".replace("rank_0", "rank_1", 1), without_slices)(path)
                case = replace(reader.case, checkpoint=str(path), fails=reader.expected == "refused")
                if reader.expected == "exact":
                    cases[f"{name}, loaded"] = replace(case, steps=SAVED)
                if reader.expected != "exact" or reader.atol is not None:
                    cases[name] = replace(case, steps=STEPS)
        return run_each(cases, ranks=ranks, here=False)


def without_slices(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["zenflow"]["layout"].update(slices=None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if reader.is_slow else n for n, reader in READERS.items()]
)
def test_readers(name: str, written: Written) -> None:
    writer, ranks, expected, case, atol, is_slow = READERS[name]
    n_writers, saving = WRITERS[writer]
    saved, runs = written.by(n_writers), written.read(n_writers, ranks, is_slow)
    if expected == "exact":
        assert_loaded(runs[f"{name}, loaded"][0], saved[writer][0])
        if written.path(writer).is_dir():
            exported = get_fp32_state_dict_from_zero_checkpoint(str(written.path(writer)))
            assert_same_tensors(runs[f"{name}, loaded"][0].master, in_order(saving, exported))
            assert saving.model is not PiecesNet or torch.equal(exported["head.weight"], exported["embedding.weight"])
    if name not in runs:
        return
    for rest, whole in zip(runs[name], saved[f"{writer}, whole"], strict=False):
        if expected == "refused":
            stages = "1 or 2, got 3" if case.stage == 3 else "3, got another"
            assert f"{written.path(writer)}: the ZeRO stage must be that of the folder, {stages}" in (rest.error or "")
        elif expected == "bits":
            assert_continues(rest, whole, SAVED)
        elif expected == "anew":
            assert rest.schedules[0] != whole.schedules[SAVED]
        else:
            assert len(rest.losses) == STEPS - SAVED
            kind = "master" if rest.master and whole.master else "weights"
            torch.testing.assert_close(getattr(rest, kind), getattr(whole, kind), rtol=1e-5 if atol else 0, atol=atol)
            if "fp16" in writer:
                assert rest.factors[0] == saved[writer][0].factors[0] == 2**-INITIAL_SCALE_POWER


def assert_loaded(ours: Run, theirs: Run) -> None:
    """What a training begins with is what another one had at the save."""
    # DeepSpeed counts for each sub-group.
    assert {*theirs.counts} <= {*ours.counts}
    if theirs.master:
        assert_same_state(replace(ours, counts=[], skipped=0), replace(theirs, counts=[], skipped=0))
    assert_same_tensors(ours.weights, theirs.weights)
    assert_same_tensors(list(ours.untrained.values()), list(theirs.untrained.values()))


def test_files_of_several_ranks(written: Written) -> None:
    """By default a folder, but for weights only; buffers and what is frozen are in a file as they are."""
    saved = written.by(2)
    assert (written.path("sub-groups") / "latest").is_file()
    for name in ("sub-groups", "file of two", "file of stage 3"):
        (whole, _), case = saved[f"{name}, whole"], WRITERS[name][1]
        end = torch.load(written.folder / f"{name}, weights.ckpt", weights_only=True)
        assert "optimizer_states" not in end and FILE_KEY not in end
        assert_same_tensors(in_order(case, end["state_dict"]), whole.master)
        if "file" in name:
            entries = torch.load(written.path(name), weights_only=True)["state_dict"]
            assert torch.equal(entries["graph"].to_dense(), torch.eye(3))
            first, weight = next(case.make_model().named_parameters())
            assert torch.equal(entries[first], weight)


@pytest.mark.parametrize("writer", ["plain 3, three, bf16", "ours 3, two"])
def test_evaluation(writer: str, written: Written) -> None:
    case, path = by_stage_3(1, writer).case, written.path(writer)
    (saved, *_) = written.by(WRITERS[writer][0])[writer]
    for function in ("validate", "test", "predict"):
        model = case.make_model()
        trainer = make_trainer(case.make_strategy(), precision=case.precision, limit_val_batches=1)
        getattr(trainer, function)(model, ckpt_path=path)
        assert_same_tensors(snapshot(model), saved.weights)
        assert_same_tensors(list(untrained(model).values()), list(saved.untrained.values()))
    # In another precision than that of the folder.
    other = PiecesNet()
    make_trainer(case.make_strategy(), limit_test_batches=1).test(other, ckpt_path=path, verbose=False)
    assert_same_tensors(snapshot(other), [w.float() for w in saved.weights])
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}: the ZeRO stage must be that of the folder"):
        make_trainer(SMALL.make_strategy(), limit_test_batches=1).test(PiecesNet(), ckpt_path=path)


def test_under_fabric(written: Written, tmp_path: Path) -> None:
    model, path = PiecesNet(), written.path("plain 3, two")
    fabric, wrapped, optimizer, _ = set_up(model, config={"zero_optimization": PIECES})
    rest = fabric.load(path, {"model": wrapped, "optimizer": optimizer})
    (saved, *_) = written.by(2)["plain 3, two"]
    assert rest["global_step"] == SAVED
    assert_same_tensors(snapshot(model), saved.weights)
    assert_same_tensors(list(untrained(model).values()), list(saved.untrained.values()))
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
    "another save": (
        edit(of_rank(1, "model"), lambda content: content.update(global_steps=3)),
        f"{of_rank(1, 'model')}: the files of all ranks must be of one save: global_steps must be 4, got 3",
    ),
    "two precisions": (
        lambda p: shutil.copy(p / of_rank(1, "optim"), p / of_rank(1, "optim").replace("bf16_zero_", "zero_")),
        "rank 1 of 3 must have one file for this run's precision, .*, got 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, written: Written, tmp_path: Path) -> None:
    damage, message = REFUSED[name]
    path = shutil.copytree(written.path("plain 3, three, bf16"), tmp_path / "a.ckpt")
    damage(path)
    case = by_stage_3(1, "plain 3, three, bf16", checkpoint=str(path)).case
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}.*{message}"):
        if name in ("a rank's model", "two precisions"):
            make_trainer(case.make_strategy(), limit_test_batches=1).test(case.make_model(), ckpt_path=path)
        else:
            run_here(case)


def test_one_file_is_open_at_a_time(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files of other ranks, none is mapped while the next one is read."""
    gc.collect()  # garbage of earlier tests may hold mapped files
    checkpoint = SavedCheckpoint(written.path("plain 3, three, bf16"))
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
