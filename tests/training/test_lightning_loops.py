"""Lightning's loops, schedulers and callbacks: with nothing late, the same numbers as under DeepSpeed's offload and plain Lightning."""

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
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from harness import fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
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
    "warm-up, then decay": lambda o: {
        "scheduler": lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
        ),
        "interval": "step",
    },
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    ours = compare(
        lambda: Net(scheduler=SCHEDULERS[name]),
        lambda: {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    )
    assert len({rates[0] for rates in ours.learning_rates}) > 1


LOOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "max_steps in mid-epoch": lambda: {"max_steps": 6},
    "max_epochs": lambda: {"max_epochs": 2},
    "no steps": lambda: {"max_steps": 0},
    "limited": lambda: {"max_epochs": 3, "limit_train_batches": 0.5},
    "overfitted": lambda: {"max_epochs": 3, "overfit_batches": 2},
    "a short test run": lambda: {"fast_dev_run": 2},
    "barebones": lambda: {"max_epochs": 1, "barebones": True},
    "validated in mid-epoch": lambda: {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1},
    "validated every second epoch": lambda: {"max_epochs": 4, "check_val_every_n_epoch": 2, "limit_val_batches": 1},
    "sanity check": lambda: {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1},
    "stopped early": lambda: {
        "max_epochs": 30,
        "limit_val_batches": 1,
        "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=0.05)],
    },
    "clipped": lambda: {"max_epochs": 2, "gradient_clip_val": 0.5},
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    ours = compare(Net, LOOPS[name])
    if name == "stopped early":
        assert 1 < ours.epochs < 30


class Stream(IterableDataset[int]):
    """Of unknown length: that a batch was the last one shows when the next one is asked for."""

    @override
    def __iter__(self) -> Any:
        return iter(range(7))


class OnStream(Net):
    @override
    def train_dataloader(self) -> Any:
        return DataLoader(Stream())


@pytest.mark.parametrize("model", [Net, OnStream])
@pytest.mark.parametrize(("accumulate", "steps"), [(3, 3 * 3), (7, 3), (9, 3)])
def test_the_last_micro_batches_of_an_epoch_make_a_step(model: type[Net], accumulate: int, steps: int) -> None:
    """Seven batches an epoch; the loss is divided by `accumulate_grad_batches` whatever is left."""
    ours = compare(
        lambda: model(length=7),
        lambda: {"max_epochs": 3, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1},
    )
    assert ours.steps == steps


def test_a_step_ends_with_the_epoch_where_results_are_late() -> None:
    """The same weights as without anything late would be chance; the steps are counted alike, and none is lost."""
    seen: list[int] = []

    class Counts(pl.Callback):
        @override
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, ZenFlowStrategy) and strategy.zenflow_optimizer is not None
            flat = strategy.zenflow_optimizer.single_partition_of_fp32_groups[0]
            seen.append(int(strategy.zenflow_optimizer.optimizer.state[flat]["step"]))

    fit(Net(length=7), ZenFlowStrategy(), steps=-1, max_epochs=3, accumulate_grad_batches=3, callbacks=[Counts()])
    assert seen == [9]


def test_learning_rate_monitor(tmp_path: Path) -> None:
    """What it writes, for both parameter groups."""
    written = []
    for who in ("zenflow", "plain"):
        options = {
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "logger": CSVLogger(tmp_path, name=who),
            "callbacks": [LearningRateMonitor("step")],
        }
        train(who, lambda: Net(scheduler=SCHEDULERS["warm restarts"]), lambda o=options: dict(o))
        with open(tmp_path / who / "version_0" / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        # Other rows are losses, and ZenFlow's own metrics.
        rates = [{key: row[key] for key in row if key.startswith("lr-")} for row in rows]
        written.append([row for row in rates if all(row.values())])
    assert written[0] == written[1]
    assert {"lr-AdamW/pg1", "lr-AdamW/pg2"} <= written[0][0].keys()


def test_weight_averaging() -> None:
    """Validation and the end of the run see the mean of the weights."""
    compare(Net, lambda: {"max_epochs": 3, "limit_val_batches": 1, "callbacks": [EMAWeightAveraging(decay=0.5)]})


def test_pruning() -> None:
    """The module has the pruned weights after `fit`; without `make_pruning_permanent` it keeps the masks."""
    for permanent in (True, False):
        compare(
            Net,
            lambda permanent=permanent: {
                "max_epochs": 3,
                "callbacks": [
                    ModelPruning(
                        "l1_unstructured",
                        parameter_names=["weight"],
                        amount=0.3,
                        use_lottery_ticket_hypothesis=False,
                        make_pruning_permanent=permanent,
                    )
                ],
            },
        )


class AtTheEnd(pl.Callback):
    """What a user exports when training or an epoch's training ends."""

    def __init__(self) -> None:
        self.exported: list[dict[str, Tensor]] = []

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.exported.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.exported.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        with torch.no_grad():
            for p in pl_module.parameters():
                p.fill_(7)


def test_the_users_hooks_see_exact_weights_and_may_replace_them() -> None:
    """With late results, weight prediction and provisional updates; exact weights are the ones that a flush leaves."""
    first = AtTheEnd()
    model = Net()
    trainer = make_trainer(
        ZenFlowStrategy(update_interval=4, publish_lag=1),
        max_epochs=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[first],
    )
    trainer.fit(model)
    strategy = trainer.strategy
    assert isinstance(strategy, ZenFlowStrategy) and strategy.zenflow_optimizer is not None
    masters = strategy.zenflow_optimizer.single_partition_of_fp32_groups
    exact = [
        flat[: sum(p.numel() for p in group)] for flat, group in zip(masters, model.parameter_groups(), strict=True)
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    exported = [torch.cat([first.exported[-1][names[id(p)]].flatten() for p in g]) for g in model.parameter_groups()]
    for ours, master in zip(exported, exact, strict=True):
        assert torch.equal(ours, master)
    # Training ends where the last validation was.
    for name, weight in first.exported[-1].items():
        assert torch.equal(weight, first.exported[-2][name])
    assert all((p == 7).all() for p in model.parameters())


class Finetuning(BaseFinetuning):
    @override
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        """Freezes nothing."""


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "StochasticWeightAveraging": (
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
        MisconfigurationException,
        "SWA does not currently support sharded models",
    ),
    "GradientAccumulationScheduler": (
        lambda: GradientAccumulationScheduler({0: 2}),
        RuntimeError,
        "does not support `accumulate_grad_batches` changing",
    ),
    "BaseFinetuning": (Finetuning, NotImplementedError, "does not support running with the DeepSpeed strategy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_callbacks_that_lightning_refuses(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit(Net(), ZenFlowStrategy(**NOTHING_LATE), callbacks=[make()])


class Skips(Net):
    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_batch_without_a_loss_is_refused(accumulate: int) -> None:
    with pytest.raises(MisconfigurationException, match="training_step must return a loss, got None"):
        fit(Skips(), accumulate_grad_batches=accumulate)


class OwnStep(Net):
    """Changes the learning rate after the step by hand."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def test_the_modules_own_optimizer_step() -> None:
    compare(lambda: OwnStep(scheduler=SCHEDULERS["every epoch"]), lambda: {"max_epochs": 2})


def test_evaluation_after_fit_gives_the_same_numbers() -> None:
    """`validate`, `test` and `predict` on the trainer that has trained."""

    class Evaluated(Net):
        @override
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test_loss", self.loss(20_000, 0, 0))

    results = []
    for strategy in (ZenFlowStrategy(**NOTHING_LATE), "auto"):
        model = Evaluated()
        trainer = make_trainer(strategy, max_epochs=2, limit_val_batches=1)
        trainer.fit(model)
        (validated,), (tested,) = trainer.validate(model, verbose=False), trainer.test(model, verbose=False)
        predicted = trainer.predict(model) or []
        results.append([validated["val_loss"], tested["test_loss"], float(predicted[0])])
    assert results[0] == pytest.approx(results[1], abs=2e-6)
