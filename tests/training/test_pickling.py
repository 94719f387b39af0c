"""What users pickle and copy while a training runs: modules, parameters, checkpoints that have them, as under plain Lightning."""

import copy
import copyreg
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch.callbacks import LambdaCallback
from test_module_after_fit import STAGES, Owned, read, written
from torch import nn
from typing_extensions import override

from as_before import looks
from callbacks import After, At
from harness import Case, fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.users_module import pickled_as_before
from rank_processes import run_on_ranks
from same_bits import assert_same_tensors


class Hooked(Owned):
    """With a module among the hyperparameters."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net


def facts(module: nn.Module) -> dict[str, Any]:
    """What can be seen of a module besides weights; the same under all strategies."""
    found = {name: seen for name, seen in looks(module).items() if not name.startswith("identity")}
    return {**found, "trained": [p.requires_grad for p in module.parameters()]}


class Pickles(pl.Callback):
    """Pickles and copies between two steps and in a validation; a checkpoint has a module and a parameter in its state."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.module: Any = None

    def look(self, module: Any) -> None:
        with GatheredParameters(list(module.parameters())):
            weights = [p.detach().clone() for p in module.parameters()]
            self.seen.append(len(written(module.head)))
            self.look_at_states(module)
        parts = [module, module.layers[0], module.layers[2], module.head, module.head.bias]
        self.seen += [len(written(part)) for part in parts]
        for twin in (read(written(module)), copy.deepcopy(module)):
            assert_same_tensors([*twin.parameters()], weights)
            assert twin.head.weight is twin.embedding.weight
            assert torch.isfinite(twin.loss(0, 0, 0)) and twin.calls == module.calls + 1
            self.seen.append(facts(twin))
        assert_same_tensors([*copy.deepcopy(module.layers[0]).parameters()], weights[1:7])

    def look_at_states(self, module: Any) -> None:
        """States are the weights themselves, also when they are read from a file; a file has what is named, and tied weights once."""
        own = module.head.state_dict()
        assert own["weight"].data_ptr() == module.head.weight.data_ptr()
        for state in (own, module.state_dict(), module.layers[0].state_dict(keep_vars=True), module.head.bias.data):
            self.seen += [len(written(state)), len(pickle.dumps(state))]
        again = read(
            written({"head": own, "all": module.state_dict(), "part": module.head.weight.detach().t()[1:, ::2]})
        )
        assert_same_tensors([*again["all"].values()], [*module.state_dict().values()])
        assert_same_tensors([again["part"]], [module.head.weight.detach().t()[1:, ::2]])
        again["head"]["weight"].zero_()
        assert not again["all"]["head.weight"].any() and not again["all"]["embedding.weight"].any()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.look(pl_module)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.look(pl_module)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.module = pl_module

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"layer": self.module.layers[0], "bias": self.module.head.bias}


def train(strategy: Any, folder: Path) -> tuple[Pickles, list[Any]]:
    """Trains with a checkpoint in a step and one after the fit; returns what the checkpoints have of modules as well."""
    model, pickles, table = Hooked(nn.Linear(2, 3)), Pickles(), dict(copyreg.dispatch_table)
    options = {"limit_val_batches": 1, "val_check_interval": 4, "num_sanity_val_steps": 0}
    save = After([2], lambda trainer: trainer.save_checkpoint(folder / "step"))
    trainer = fit(model, strategy, steps=4, callbacks=[pickles, save], **options)
    trainer.save_checkpoint(folder / "end")
    assert copyreg.dispatch_table == table
    kept = []
    for path in (folder / "step", folder / "end"):
        file = path if path.is_file() else next(path.glob("*/*mp_rank_00_model_states.pt"))
        content = torch.load(file, weights_only=False)
        state = content["callbacks"]["Pickles"]
        kept.append([facts(content["hyper_parameters"]["net"]), facts(state["layer"]), vars(state["bias"])])
        torch.testing.assert_close(state["layer"](torch.ones(2, 12)).isfinite().all(), torch.tensor(True))
    return pickles, kept


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pickles, list[Any]]:
    """Under plain Lightning."""
    return train("auto", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("stage", "checkpoint_format"), [("2", "lightning"), ("3", "deepspeed"), ("3, in host memory", "lightning")]
)
def test_as_under_plain_lightning(stage: str, checkpoint_format: Any, plain: Any, tmp_path: Path) -> None:
    """Only the memory of what is named is written, and nothing of DeepSpeed's."""
    pickles, kept = train(ZenFlowStrategy(**STAGES[stage], checkpoint_format=checkpoint_format), tmp_path)
    assert pickles.seen == plain[0].seen
    assert kept == plain[1]


def test_a_users_own_function_is_called_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(module: nn.Linear) -> Any:
        return nn.Linear, (module.in_features, 5)

    monkeypatch.setitem(copyreg.dispatch_table, nn.Linear, reduce)  # type: ignore[arg-type]
    with pickled_as_before([nn.Linear(2, 3)]):
        assert pickle.loads(pickle.dumps(nn.Linear(2, 3))).out_features == 5
    assert copyreg.dispatch_table[nn.Linear] is reduce


@pytest.mark.parametrize(("function", "stage"), [("fit", "2"), ("fit", "3, in host memory"), ("predict", "3")])
def test_trainer_and_strategy_afterwards(stage: str, function: str) -> None:
    """A copy has the module, trains further and flushes its own strategy."""
    trainer = make_trainer(ZenFlowStrategy(**STAGES[stage]), max_steps=2)
    getattr(trainer, function)(Hooked())
    for again in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert again.strategy is not trainer.strategy and again.strategy.zenflow_optimizer is None
        assert_same_tensors([*again.lightning_module.parameters()], [*trainer.lightning_module.parameters()])
    again.fit_loop.epoch_loop.max_steps = 4
    again.fit(again.lightning_module)
    assert again.global_step == 4 and trainer.global_step == (2 if function == "fit" else 0)
    flushing = next(c for c in again.callbacks if isinstance(c, LambdaCallback))
    assert flushing.on_train_end.__self__ is again.strategy._requests  # type: ignore[attr-defined]


def pickle_alone(trainer: pl.Trainer) -> None:
    """On several ranks: a divided parameter is an error, a gathered one is not."""
    head: Any = trainer.lightning_module.head
    for function in (written, copy.deepcopy):
        with pytest.raises(RuntimeError, match="within `deepspeed.zero.GatheredParameters"):
            function(head)
    with GatheredParameters([head.weight, head.bias]):
        twins = [copy.deepcopy(head).weight, read(written(head)).weight]
        assert_same_tensors(twins, [head.weight.detach().clone()] * 2)


def test_divided_parameters_on_several_ranks() -> None:
    pickles = (At("on_train_batch_end", pickle_alone),)
    case = Case(model="TiedNet", stage=3, steps=2, topk_ratio=0, update_interval=1, publish_lag=0, callbacks=pickles)
    run_on_ranks({"case": case})
