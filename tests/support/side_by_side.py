"""The same training under ZenFlow with nothing late, under DeepSpeed's own ZeRO-2 offload and under plain Lightning, side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from harness import StockStrategy, fit, make_trainer, snapshot
from lightning_zenflow import ZenFlowStrategy
from models import OptimizerOptions, TestModule
from networks import SmallNet

Who = Literal["zenflow", "stock", "plain"]
NOTHING_LATE: dict[str, Any] = {
    "topk_ratio": 0.3,
    "update_interval": 1,
    "publish_lag": 0,
    "overlap_step": False,  # every forward pass with the true clip factor
    "worker_cores": 1,
    "worker_timeout": 250,
}
LATE: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 4, "publish_lag": 1, "worker_cores": 1}
HOW: dict[str, dict[str, Any]] = {
    "nothing late": NOTHING_LATE,
    "in backward": {"update_interval": 1, "publish_lag": 0, "worker_cores": 1},
    "late": {"update_interval": 4, "publish_lag": 1, "full_warm_up_rounds": 0, "worker_cores": 1},
    "stage 3": {**NOTHING_LATE, "stage": 3},
    "in host memory": {"stage": 3, "offload_parameters": True, "worker_cores": 1},
}
assert_near = partial(torch.testing.assert_close, rtol=0, atol=2e-6)


class Net(SmallNet):
    """Data is a function of epoch and batch, since Lightning's step counter is among what is compared; logs and keeps its losses.

    Args:
        length: batches in an epoch.
        scheduler: makes what `configure_optimizers` returns as "lr_scheduler"; None: the test models' own, by step.
    """

    def __init__(self, *, length: int = 4, scheduler: Callable[[Any], Any] | None = None) -> None:
        super().__init__(length=length, optimizer=OptimizerOptions(lr=3e-3))
        self.make_scheduler = scheduler
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(int(batch) + 100 * self.trainer.current_epoch, 0, self.trainer.global_rank)
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(10_000 + int(batch), 0, 0)
        self.log("val_loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if self.make_scheduler is not None:
            configured["lr_scheduler"] = self.make_scheduler(configured["optimizer"])
        return configured


class Outcome(pl.Callback):
    """What a run did."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.metrics: list[dict[str, float]] = []
        """After each batch and each validation: everything that was logged so far."""
        self.learning_rates: list[list[float]] = []
        """For each batch, of each parameter group."""
        self.steps = self.epochs = 0
        self.skipped = 0
        """Steps with an overflow of fp16, by DeepSpeed's count."""

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.learning_rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    @override
    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def train(
    who: Who,
    make_model: Callable[[], pl.LightningModule],
    options: Callable[[], dict[str, Any]],
    keys: dict[str, Any] | None = None,
) -> Outcome:
    """One run.

    Args:
        who: under which strategy.
        make_model: makes the model.
        options: makes the Trainer's options, fresh callbacks among them.
        keys: ZenFlow's instead of `NOTHING_LATE`.
    """
    outcome, chosen, model = Outcome(), options(), make_model()
    strategies = {"stock": StockStrategy, "plain": lambda: "auto"}
    strategy = strategies.get(who, lambda: ZenFlowStrategy(**(keys or NOTHING_LATE)))()
    trainer = make_trainer(strategy, **{**chosen, "callbacks": [*chosen.get("callbacks", []), outcome]})
    trainer.fit(model)
    outcome.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome.steps, outcome.epochs = trainer.global_step, trainer.current_epoch
    if who != "plain":
        outcome.skipped = trainer.strategy.deepspeed_engine.skipped_steps
    return outcome


def assert_same(ours: Outcome, theirs: Outcome, *, atol: float = 2e-6) -> None:
    """The same numbers, but for float32's rounding (see test_equivalence), in as many steps and epochs, at the same learning rates."""
    assert (ours.steps, ours.epochs, ours.skipped) == (theirs.steps, theirs.epochs, theirs.skipped)
    assert ours.learning_rates == theirs.learning_rates
    assert len(ours.metrics) == len(theirs.metrics)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a.keys() == b.keys()
        torch.testing.assert_close(list(a.values()), list(b.values()), rtol=0, atol=atol)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        torch.testing.assert_close(
            weight, theirs.weights[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def compare(
    make_model: Callable[[], pl.LightningModule],
    options: Callable[[], dict[str, Any]],
    *,
    others: Sequence[Who] = ("stock", "plain"),
    atol: float = 2e-6,
) -> Outcome:
    """Trains under ZenFlow and others; returns ZenFlow's outcome."""
    ours = train("zenflow", make_model, options)
    for other in others:
        assert_same(ours, train(other, make_model, options), atol=atol)
    return ours


def compare_weights(
    keys: dict[str, Any],
    make_callbacks: Callable[[], list[pl.Callback]],
    make_model: Callable[[], TestModule] = SmallNet,
    *,
    atol: float = 2e-6,
    precision: Any = "32-true",
    **options: Any,
) -> TestModule:
    """The same run under ZenFlow, in a precision, and under plain Lightning ends with the same weights; returns ZenFlow's model."""
    ours, theirs = make_model(), make_model()
    options = {"steps": 6, **options}
    fit(ours, ZenFlowStrategy(**keys), callbacks=make_callbacks(), precision=precision, **options)
    fit(theirs, "auto", callbacks=make_callbacks(), **options)
    assert_near([p.float() for p in snapshot(ours)], snapshot(theirs), atol=atol)
    return ours
