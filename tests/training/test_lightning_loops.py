"""Lightning's loops, loaders, schedulers and callbacks: with nothing late, the same numbers as under DeepSpeed's offload or plain
Lightning, or refused."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from harness import fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import Indexes
from side_by_side import NOTHING_LATE, Net, compare, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

SCHEDULERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "every epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
    "every second step": lambda o: {
        "scheduler": lr_scheduler.ExponentialLR(o, 0.8),
        "interval": "step",
        "frequency": 2,
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3, threshold=0.2),
        "monitor": "val_loss",
    },
    "warm restarts": lambda o: {"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(o, 3), "interval": "step"},
    # Changes beta1 as well.
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=13), "interval": "step"},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    ours = compare(
        lambda: Net(scheduler=SCHEDULERS[name]),
        lambda: {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0},
        others=("plain",),
    )
    assert len({rates[0] for rates in ours.learning_rates}) > 1


def pruning(permanent: bool) -> dict[str, Any]:
    callback = ModelPruning(
        "l1_unstructured",
        parameter_names=["weight"],
        amount=0.3,
        use_lottery_ticket_hypothesis=False,
        make_pruning_permanent=permanent,
    )
    return {"max_epochs": 2, "callbacks": [callback]}


LOOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "max_steps in mid-epoch": lambda: {"max_steps": 6, "gradient_clip_val": 0.5},
    "no steps": lambda: {"max_steps": 0},
    "limited": lambda: {"max_epochs": 3, "limit_train_batches": 0.5},
    "overfitted": lambda: {"max_epochs": 3, "overfit_batches": 2},
    "a short test run": lambda: {"fast_dev_run": 2},
    "barebones": lambda: {"max_epochs": 1, "barebones": True},
    "validated in mid-epoch": lambda: {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1},
    "validated every second epoch": lambda: {"max_epochs": 4, "check_val_every_n_epoch": 2, "limit_val_batches": 1},
    "stopped early": lambda: {
        "max_epochs": 30,
        "limit_val_batches": 1,
        "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=0.05)],
    },
    # Validation and the end of the run see the mean of the weights.
    "averaged": lambda: {"max_epochs": 3, "limit_val_batches": 1, "callbacks": [EMAWeightAveraging(decay=0.5)]},
    # The module has the pruned weights after `fit`; without `make_pruning_permanent` it keeps the masks.
    "pruned for good": lambda: pruning(True),
    "pruned by masks": lambda: pruning(False),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    ours = compare(Net, LOOPS[name], others=("plain",))
    if name == "stopped early":
        assert 1 < ours.epochs < 30


class Loaded(Net):
    """Counts how often its loader is asked for.

    Args:
        make: makes the loader.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make, self.asked = make, 0

    @override
    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.make()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch_idx, 0, 0)


LOADERS: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"a": DataLoader(Indexes(4)), "b": DataLoader(Indexes(4))},
    "combined": lambda: CombinedLoader({"a": DataLoader(Indexes(4)), "b": DataLoader(Indexes(3))}, "min_size"),
    "without batches": lambda: DataLoader(Indexes(4), batch_size=None),
    "a list of batches": lambda: DataLoader(Indexes(4), batch_sampler=[[0], [1, 2], [3]]),
    "no loader at all": lambda: range(4),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders(name: str) -> None:
    made: list[Loaded] = []

    def make() -> Loaded:
        made.append(Loaded(LOADERS[name]))
        return made[-1]

    compare(make, lambda: {"max_epochs": 1}, others=("plain",))
    assert {model.asked for model in made} == {1}


class Stream(IterableDataset[int]):
    """Of unknown length: that a batch was the last one shows when the next one is asked for."""

    @override
    def __iter__(self) -> Any:
        return iter(range(7))


class OnStream(Net):
    @override
    def train_dataloader(self) -> Any:
        return DataLoader(Stream())


@pytest.mark.parametrize(("model", "accumulate", "steps"), [(Net, 3, 9), (OnStream, 3, 9), (Net, 9, 3)])
def test_the_last_micro_batches_of_an_epoch_make_a_step(model: type[Net], accumulate: int, steps: int) -> None:
    """Seven batches an epoch; the loss is divided by `accumulate_grad_batches` whatever is left."""
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    ours = compare(lambda: model(length=7), lambda: dict(options))
    assert ours.steps == steps


def test_learning_rate_monitor(tmp_path: Path) -> None:
    """What it writes, for both parameter groups, momentum and weight decay included."""
    written = []
    for who in ("zenflow", "plain"):
        options = {
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "logger": CSVLogger(tmp_path, name=who),
            "callbacks": [LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)],
        }
        train(who, lambda: Net(scheduler=SCHEDULERS["warm restarts"]), lambda o=options: dict(o))
        with open(tmp_path / who / "version_0" / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        # Other rows are losses, and ZenFlow's own metrics.
        rates = [{key: row[key] for key in row if key.startswith("lr-")} for row in rows]
        written.append([row for row in rates if all(row.values())])
    assert written[0] == written[1]
    assert {"lr-AdamW/pg1", "lr-AdamW/pg2", "lr-AdamW/pg2-momentum"} <= written[0][0].keys()


class AtTheEnd(pl.Callback):
    """What a user exports where an epoch is validated and where training ends, and weights that the user writes there."""

    def __init__(self) -> None:
        self.exported: list[list[Tensor]] = []

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        groups = pl_module.parameter_groups()  # type: ignore[operator]
        self.exported.append([torch.cat([p.detach().flatten() for p in group]) for group in groups])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)
        with torch.no_grad():
            for p in pl_module.parameters():
                p.fill_(7)


def test_the_users_hooks_see_exact_weights_and_may_replace_them() -> None:
    """With late results, weight prediction and provisional updates; exact weights are the ones that a flush leaves."""
    seen, model = AtTheEnd(), Net()
    trainer = make_trainer(
        ZenFlowStrategy(update_interval=4, publish_lag=1),
        max_epochs=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[seen],
    )
    trainer.fit(model)
    assert isinstance(trainer.strategy, ZenFlowStrategy) and trainer.strategy.zenflow_optimizer is not None
    masters = trainer.strategy.zenflow_optimizer.single_partition_of_fp32_groups
    # Training ends where the last validation was.
    for validated, ended, master in zip(*seen.exported[-2:], masters, strict=True):
        assert torch.equal(ended, master[: ended.numel()])
        assert torch.equal(ended, validated)
    assert all((p == 7).all() for p in model.parameters())


class Finetuning(BaseFinetuning):
    @override
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        """Freezes nothing."""


class Skips(Net):
    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "StochasticWeightAveraging": (
        lambda: {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]},
        MisconfigurationException,
        "SWA does not currently support sharded models",
    ),
    "GradientAccumulationScheduler": (
        lambda: {"callbacks": [GradientAccumulationScheduler({0: 2})]},
        RuntimeError,
        "does not support `accumulate_grad_batches` changing",
    ),
    "BaseFinetuning": (
        lambda: {"callbacks": [Finetuning()]},
        NotImplementedError,
        "does not support running with the DeepSpeed strategy",
    ),
    "a batch without a loss": (
        lambda: {"model": Skips(), "accumulate_grad_batches": 4},
        MisconfigurationException,
        "training_step must return a loss, got None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    options = {"model": Net(), **make()}
    with pytest.raises(error, match=message):
        fit(strategy=ZenFlowStrategy(**NOTHING_LATE), **options)


class OwnStep(Net):
    """Changes the learning rate after the step by hand."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def test_the_modules_own_optimizer_step() -> None:
    compare(lambda: OwnStep(scheduler=SCHEDULERS["every epoch"]), lambda: {"max_epochs": 2}, others=("plain",))


class OwnClipping(Net):
    @override
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Does nothing, and is not what clips: `gradient_clip_val` is, as under DeepSpeedStrategy."""


def test_the_modules_own_clipping_hook_does_not_clip() -> None:
    options = {"max_steps": 3, "gradient_clip_val": 0.01}
    own, given = (train("zenflow", model, lambda: dict(options)) for model in (OwnClipping, Net))
    assert all(torch.equal(weight, given.weights[name]) for name, weight in own.weights.items())


def test_evaluation_after_fit_gives_the_same_numbers() -> None:
    """`validate`, `test` and `predict` on the trainer that has trained."""
    results = []
    for strategy in (ZenFlowStrategy(**NOTHING_LATE), "auto"):
        model = Net()
        trainer = make_trainer(strategy, max_epochs=2, limit_val_batches=1)
        trainer.fit(model)
        (validated,) = trainer.validate(model, verbose=False)
        trainer.test(model, verbose=False)
        results.append([validated["val_loss"], float((trainer.predict(model) or [])[0])])
    assert results[0] == pytest.approx(results[1], abs=2e-6)
