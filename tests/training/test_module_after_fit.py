"""After training, evaluation or an error a module is what it was before: to be saved, copied, taken apart and trained anew.

That nothing is left on it, `harness.run_case` and `fabric_runs.run_case` compare for every case, on any number of ranks. On a recorded
device, whose process group refuses tensors of the host: files that are saved afterwards, and where the module is.
"""

import copy
import gc
import io
import pickle
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from typing_extensions import override

from as_before import assert_as_before, looks
from callbacks import At
from checkpoint_files import assert_saved
from fabric_runs import set_up, train_step
from harness import PLACES, Case, fit, make_trainer, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.deepspeed.users_module import make_whole
from lightning_zenflow.deepspeed.users_objects import UsersOptimizer
from lightning_zenflow.worker.machine import HOST_MEMORY
from lightning_zenflow.worker.process import WorkerError
from networks import TiedNet
from processes import ArenaWatch, shared_bytes
from rank_processes import run_each
from recorded_device.watch import recorded_device
from same_bits import assert_same_tensors
from stage3_runs import PiecesNet

STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {},
    # One of its modules is gathered as one.
    "3": {"config": {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["layers.2"]}}}},
    "3, in host memory": {"stage": 3, "offload_parameters": True},
}


class Owned(TiedNet):
    """Has tied and frozen weights, and what users put on modules and parameters."""

    def __init__(self) -> None:
        super().__init__(frozen=(1,))
        self.ds_train = list(range(3))
        self.calls = 0
        self.head.register_forward_hook(self.count)
        self.head.weight.no_decay = True  # type: ignore[attr-defined]
        set_z3_leaf_module(self.layers[0], True)

    def count(self, *_: Any) -> None:
        self.calls += 1


def stops(error: type[BaseException]) -> At:
    """Ends a training with an error in its third step."""

    def stop(trainer: pl.Trainer) -> None:
        if trainer.global_step == 2:
            raise error("in the middle")

    return At("on_before_optimizer_step", stop)


def written(value: Any) -> bytes:
    """A file of torch's with a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def assert_usable(model: nn.Module, folder: Path) -> None:
    """Every way out of a module gives its weights and no more."""
    weights = model.state_dict()
    for twin in (read(written(model)), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same_tensors([*twin.state_dict().values()], [*weights.values()])
        assert twin.head.weight is twin.embedding.weight and twin.ds_train == [0, 1, 2]
    safetensors.torch.save_model(model, str(folder / "a.safetensors"))
    other = type(model)()
    safetensors.torch.load_model(other, str(folder / "a.safetensors"))
    assert_same_tensors([*other.state_dict().values()], [*weights.values()])
    part = model.get_submodule("layers.0.1").state_dict()
    torch.save(part, folder / "part.pt")
    assert (folder / "part.pt").stat().st_size < sum(x.nbytes for x in part.values()) + 2500


@pytest.mark.parametrize("stage", STAGES)
def test_everything_but_the_weights_is_as_before(stage: str, tmp_path: Path) -> None:
    """Evaluated or trained, the module trains again, under the same stage and under plain Lightning, and counts by its own hook."""
    model = Owned()
    before, linear = looks(model), nn.functional.linear
    for function in ("validate", "fit", "predict", "fit", "fit under auto"):
        weights, calls = [p.detach().clone() for p in model.parameters()], model.calls
        strategy = "auto" if function == "fit under auto" else ZenFlowStrategy(**STAGES[stage])
        n_batches = {"max_steps": 2, "limit_val_batches": 0 if "fit" in function else 1, "limit_predict_batches": 1}
        getattr(make_trainer(strategy, **n_batches), function.split()[0])(model)
        assert_as_before(before, model)
        changed = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
        assert changed == [p.requires_grad and "fit" in function for p in model.parameters()]
        assert model.calls == calls + (2 if "fit" in function else 1)
        assert_usable(model, tmp_path)
    assert nn.functional.linear is linear


def patched(*args: Any) -> Tensor:
    """As a library replaces `linear`."""
    return torch.matmul(args[0], args[1].t()) + args[2]


def test_a_users_own_linear_stays() -> None:
    """One that is there before a training, one that is gone before the next, and one that is put there while a training runs."""
    torchs = nn.functional.linear
    for linear in (patched, torchs, patched):
        nn.functional.linear = linear
        fit(Owned(), ZenFlowStrategy(stage=3), steps=2)
        assert nn.functional.linear is linear
    nn.functional.linear = torchs
    patches = At("on_train_batch_start", lambda _: setattr(nn.functional, "linear", patched))
    fit(Owned(), ZenFlowStrategy(stage=3), steps=2, callbacks=[patches])
    assert nn.functional.linear is patched


@pytest.mark.parametrize(
    ("stage", "error"), [("2", ValueError), ("3", KeyboardInterrupt), ("3, in host memory", ValueError)]
)
def test_an_error_leaves_nothing(
    stage: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step, or where the set-up fails behind the division of the parameters.

    Neither worker nor memory, as soon as `fit` is left; the incomplete state cannot be saved. Lightning ends the process on Ctrl-C.
    """
    model, arenas = Owned(), list[ArenaWatch]()
    before, watch = looks(model), At("on_train_start", lambda t: arenas.append(ArenaWatch(t.strategy)))
    strategy = ZenFlowStrategy(**STAGES[stage])
    trainer = make_trainer(strategy, max_steps=3, limit_val_batches=1, callbacks=[watch, stops(error)])
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(model)
    assert workers() == []
    if "host" not in stage:
        assert arenas[0].n_bytes == 0
        with pytest.raises(WorkerError, match="training ended before the worker had applied all of its . steps"):
            trainer.save_checkpoint(tmp_path / "a.ckpt")
    arenas[0].close()
    assert_as_before(before, model)
    assert_usable(model, tmp_path)
    # Its weights are there, for another Trainer too.
    trainer.validate(model, verbose=False)
    gc.collect()
    shared = shared_bytes()
    with monkeypatch.context() as patch, pytest.raises(WorkerError, match="exited with status 1"):
        patch.setenv("LIGHTNING_ZENFLOW_WORKER", "/bin/false")
        fit(model, ZenFlowStrategy(**STAGES[stage]))
    assert shared_bytes() <= shared
    assert_as_before(before, model)
    fit(model, ZenFlowStrategy(**STAGES[stage]))


SAVED = Case(model="TiedNet", model_options={"frozen": (1,)}, steps=4, topk_ratio=0, update_interval=1, publish_lag=0)
SAVED = replace(SAVED, loop="recorded").with_keys(checkpoint_format="lightning")
LATE, FOLDER = {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1}, {"checkpoint_format": "deepspeed"}
SAVES: dict[str, Case] = {
    "2": SAVED.with_keys(moments_dtype="bfloat16"),
    "2, late, folder": replace(SAVED, **LATE).with_keys(**FOLDER),
    "3": replace(SAVED, stage=3).with_keys(moments_dtype="int8"),
    "3, folder": replace(SAVED, stage=3).with_keys(**FOLDER),
    "3, in host memory": replace(SAVED, stage=3, offload_parameters=True).with_keys(moments_dtype="int8"),
}


def write(path: Path, trainer: pl.Trainer) -> None:
    """When the parameters have left the device, a checkpoint of the training that has ended, and the weights that a rank has."""
    assert {p.device for p in trainer.lightning_module.parameters()} == {torch.device("cpu")}
    trainer.save_checkpoint(path)
    torch.save(trainer.lightning_module.state_dict(), path.with_suffix(f".{trainer.global_rank}"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_has_ended_can_be_saved(ranks: int, tmp_path: Path) -> None:
    """With the state at its end and the weights of frozen parameters; all ranks have whole weights."""
    paths, cases = {name: tmp_path / name.replace(" ", "") for name in SAVES}, dict[str, Case]()
    for name, case in SAVES.items():
        cases[name] = replace(case, callbacks=(At("on_fit_end", partial(write, paths[name])),))
        cases[f"{name}, resumed"] = replace(case, loop="trainer", checkpoint=str(paths[name]))
    runs = run_each(cases, ranks=ranks)
    for name, path in paths.items():
        for saved, resumed in zip(runs[name], runs[f"{name}, resumed"], strict=True):
            assert resumed.losses == [] and not saved.races
            for kind in ("master", "exp_avg", "exp_avg_sq", "weights"):
                assert_same_tensors(getattr(resumed, kind), getattr(saved, kind), kind)
        if path.is_file():
            assert_saved(path, runs[name][0], SAVES[name])
        first, *others = (torch.load(path.with_suffix(f".{rank}")) for rank in range(ranks))
        for other in others:
            assert_same_tensors([*other.values()], [*first.values()])


def test_pieces_stay_where_whole_weights_find_no_room_or_a_rank_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one of two ranks of a host, which has no room for the weights of both."""
    looked = []

    def stay(trainer: pl.Trainer) -> None:
        parameters: list[Any] = list(trainer.lightning_module.parameters())
        before = [p.numel() for p in parameters]
        n_bytes = sum(p.ds_numel * p.element_size() for p in parameters)
        for together, room in ((False, 2.0), (True, 1.9)):
            with monkeypatch.context() as patch:
                patch.setattr("lightning_zenflow.deepspeed.users_module.dist.get_world_size", lambda *_: 2)
                patch.setattr("lightning_zenflow.deepspeed.users_module.all_agree", bool)
                patch.setenv(HOST_MEMORY, str(room * n_bytes / 2**30))
                make_whole(trainer.lightning_module, ranks_on_host=2, together=together)
            looked.append([p.numel() for p in parameters] == before)

    fit(Owned(), ZenFlowStrategy(stage=3), callbacks=[At("on_train_end", stay)])
    assert looked == [True, True]


class OwnOptimizer(Owned):
    """Its optimizer is made once, as Hugging Face's and Lightly's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    @override
    def configure_optimizers(self) -> Any:
        return self.own


@pytest.mark.parametrize(
    ("stage", "checkpoint_format"), [("1", "lightning"), ("3", "deepspeed"), ("3, in host memory", "lightning")]
)
def test_the_optimizer_has_the_modules_parameters_again(stage: str, checkpoint_format: Any, tmp_path: Path) -> None:
    """It trains a second time, and by itself; the training that has ended can be saved, and leaves no state in it, which is said."""
    model = OwnOptimizer()
    given = [list(group["params"]) for group in model.own.param_groups]
    for number, ends in enumerate((False, True, False)):
        strategy = ZenFlowStrategy(**STAGES[stage], checkpoint_format=checkpoint_format)
        trainer = make_trainer(strategy, max_steps=4, callbacks=[stops(ValueError)] if ends else [])
        anew = pytest.warns(UserWarning, match="moments and step count start at zero") if number else nullcontext()
        with pytest.raises(ValueError) if ends else nullcontext(), anew:
            trainer.fit(model)
        if not ends:
            trainer.save_checkpoint(tmp_path / "end")
            pieces = [of.get("ds_tensor") for of in strategy._checkpoints.trained.released.values()]
            # The module has the memory.
            assert not any(piece.numel() for piece in pieces if piece is not None)
        for group, params in zip(model.own.param_groups, given, strict=True):
            assert [*map(id, group["params"])] == [*map(id, params)]
        assert model.own.state_dict()["state"] == {}
    weights = copy.deepcopy(model.state_dict())
    model.loss(0, 0, 0).backward()
    model.own.step()
    # The moments of that step are the user's.
    with pytest.warns(UserWarning, match="moments and step count start at zero"):
        UsersOptimizer(copy.deepcopy(model.own))
    assert not any(torch.equal(p, weights[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_an_optimizer_that_has_not_trained_begins_without_a_warning() -> None:
    """And without the group that a callback has added to it."""
    model = OwnOptimizer()
    late = [nn.Parameter(torch.ones(2, dtype=torch.float32))]
    adds = At("on_train_start", lambda _: model.own.add_param_group({"params": late}))
    with pytest.raises(MisconfigurationException, match="add_param_group must not be called in training"):
        fit(model, ZenFlowStrategy(), steps=2, callbacks=[adds])
    assert len(model.own.param_groups) == 1
    trainer = make_trainer(ZenFlowStrategy(), max_steps=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ZenFlow: the optimizer's moments")
        trainer.fit(model)


@pytest.mark.parametrize("entirely", [False, True])
def test_pieces_that_a_construction_has_lost(entirely: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C while DeepSpeed moves them: the error is the user's, and not one of the teardown."""

    def loses(optimizer: Any) -> None:
        lost = next(iter(optimizer.module.parameters()))
        if entirely:
            lost.ds_tensor = None
        else:
            lost.ds_tensor.data = torch.empty(0, dtype=torch.float32)
        raise ValueError("the user's own")

    monkeypatch.setattr(ZenFlowZero3Optimizer, "_setup_for_real_optimizer", loses)
    with pytest.raises(ValueError, match="the user's own"):
        fit(Owned(), ZenFlowStrategy(stage=3))


@pytest.mark.parametrize("place", PLACES)
def test_a_module_of_fabric_is_in_one_place(place: str) -> None:
    """Weights, buffers, and with them what a forward pass needs; one that was in host memory stays there."""
    case = replace(SAVED, **PLACES[place])
    model = PiecesNet(length=case.steps)
    with recorded_device():
        fabric, wrapped, optimizer, _ = set_up(model, **case.keys())
        train_step(fabric, wrapped, optimizer, 0)
        fabric.strategy.teardown()
        expected = torch.device("cpu") if case.offload_parameters else fabric.strategy.root_device
        assert {t.device for t in (*model.parameters(), *model.buffers())} == {expected}
        assert model.device == expected and model.loss(1, 0, 0).isfinite()
