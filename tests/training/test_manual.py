"""Manual optimization: the steps of `automatic_optimization = False` are those of torch's AdamW; of automatic ones, see test_ranks."""

import csv
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from callbacks import After, save
from harness import make_trainer, weights_of
from lightning_zenflow import StallMonitor, ZenFlowStrategy
from lightning_zenflow.core.errors import MisconfigurationException
from models import generator, small_net

EXACT = {"update_interval": 1, "publish_lag": 0, "clip_prediction": False}
IN_HOST_MEMORY = {"stage": 3, "offload_parameters": True}


class Manual(pl.LightningModule):
    """A perceptron whose `training_step` is one of the functions below.

    Args:
        train: takes the module, a batch and its number.
    """

    def __init__(self, train: Callable[["Manual", Tensor, int], Any], *, scheduled: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = small_net()
        self._train, self._scheduled = train, scheduled
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.net(batch) - batch.sum(1, keepdim=True).sin()).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self._train(self, batch, batch_idx)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if not self._scheduled:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([*torch.randn(96, 12, generator=generator(5))], batch_size=8)

    val_dataloader = train_dataloader


def plain(module: Manual, batch: Tensor, number: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    optimizer.step()


def clipped(module: Manual, batch: Tensor, number: int) -> None:
    optimizer = module.optimizers()
    module.manual_backward(module.loss(batch))
    for norm in (0.05 if number % 3 else 10, 0.2):
        module.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")
    optimizer.step()
    optimizer.zero_grad()


def accumulated(module: Manual, batch: Tensor, number: int) -> None:
    """By steps that are left out, after three backward passes or two; in the end by what Lightning has for it."""
    optimizer = module.optimizers()
    is_last = number % 5 in (2, 4)
    with optimizer.toggle_model(sync_grad=is_last) if number > 4 else nullcontext():
        module.manual_backward(module.loss(batch) / 3)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def in_closure(module: Manual, batch: Tensor, number: int) -> None:
    """The update hides behind backward."""
    optimizer = module.optimizers()

    def closure() -> Tensor:
        loss = module.loss(batch)
        optimizer.zero_grad()
        module.manual_backward(loss)
        return loss

    optimizer.step(closure)


def several_in_closure(module: Manual, batch: Tensor, number: int) -> None:
    optimizer = module.optimizers()

    def closure() -> None:
        optimizer.zero_grad()
        for part in (batch[:4], batch[4:]):
            module.manual_backward(module.loss(part))

    optimizer.step(closure)


def retained(module: Manual, batch: Tensor, number: int) -> None:
    """Two backward passes of one forward pass, in a closure."""

    def closure() -> None:
        loss = module.loss(batch)
        module.manual_backward(loss, retain_graph=True)
        module.manual_backward(loss)

    module.optimizers().step(closure)
    module.zero_grad()


def twice(module: Manual, batch: Tensor, number: int) -> None:
    """Two steps a batch, the second one of two backward passes, and gradients that are dropped."""
    plain(module, batch[:4], number)
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch[:2]))
    (module if number % 2 else optimizer).zero_grad()
    for part in (batch[2:4], batch[4:]):
        module.manual_backward(module.loss(part))
    optimizer.step()


def in_turn(module: Manual, batch: Tensor, number: int) -> None:
    """Two steps a batch, the first one of the last layer only."""
    first, last = module.net[0], module.net[-1]
    for frozen, part in ((first, batch[:4]), (None, batch[4:])):
        first.requires_grad_(frozen is not first)
        plain(module, part, number)
    if number == 3:
        # For the next one, behind its beginning.
        last.bias.requires_grad_(False)
    elif number == 4:
        last.bias.requires_grad_(True)


def scheduled(module: Manual, batch: Tensor, number: int) -> None:
    plain(module, batch, number)
    module.lr_schedulers().step()


LOOPS = {
    f.__name__: f for f in (clipped, accumulated, in_closure, several_in_closure, retained, twice, scheduled, in_turn)
}


def fit(train: Callable[[Manual, Tensor, int], Any], strategy: Any, **options: Any) -> Manual:
    module = Manual(train, scheduled=train is scheduled)
    trainer = make_trainer(strategy, max_epochs=1, max_steps=-1, **options)
    trainer.fit(module)
    module.global_steps = trainer.global_step
    return module


def compare(train: Callable[[Manual, Tensor, int], Any], keys: dict[str, Any], **options: Any) -> None:
    """Losses, steps and weights are those of torch's AdamW."""
    ours, theirs = (fit(train, strategy, **options) for strategy in (ZenFlowStrategy(worker_cores=1, **keys), "auto"))
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-5)
    assert ours.global_steps == theirs.global_steps
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOOPS)
def test_losses_are_those_of_torchs_adamw(name: str) -> None:
    compare(LOOPS[name], EXACT)


@pytest.mark.parametrize("name", ["clipped", "accumulated", "in_closure", "several_in_closure", "in_turn"])
def test_losses_of_parameters_in_host_memory(name: str) -> None:
    compare(LOOPS[name], IN_HOST_MEMORY)


def test_what_is_frozen_in_turns_keeps_the_weights_of_the_forward_pass_in_backward() -> None:
    """Also without columns on the device, for whose selection a step is synchronous."""

    def in_turns(module: Manual, batch: Tensor, number: int) -> None:
        layers = module.net[0], module.net[-1]
        for frozen, trained in (layers, layers[::-1]):
            frozen.requires_grad_(False)
            trained.requires_grad_(True)
            loss = module.loss(batch)
            (expected,) = torch.autograd.grad(loss, [trained.weight], retain_graph=True)
            arrived: list[Tensor] = []
            handle = trained.weight.register_hook(arrived.append)
            module.manual_backward(loss)
            assert torch.equal(*arrived, expected)
            handle.remove()
            module.optimizers().step()
            module.optimizers().zero_grad()

    fit(in_turns, ZenFlowStrategy(worker_cores=1, update_interval=4, publish_lag=1, topk_ratio=0.0))


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_validation_between_backward_and_step(where: str) -> None:
    """Lightning drops the gradients before it, in manual optimization."""
    options = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    compare(accumulated, {**EXACT, "accumulate_on": where}, **options)


def more_in_closure(module: Manual, batch: Tensor, number: int) -> None:
    def closure() -> None:
        for loss in [module.loss(batch) for _ in range(1 + number)]:
            module.manual_backward(loss)

    module.optimizers().step(closure)
    module.zero_grad()


def behind_clipping(module: Manual, batch: Tensor, number: int) -> None:
    module.manual_backward(module.loss(batch))
    module.clip_gradients(module.optimizers(), gradient_clip_val=1.0)
    module.manual_backward(module.loss(batch))


def by_torch(module: Manual, batch: Tensor, number: int) -> None:
    module.loss(batch).backward()
    module.optimizers().step()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (more_in_closure, "no second one in the closure of `optimizer.step` where the closure before had one only"),
        (behind_clipping, "no backward pass behind `clip_gradients`"),
        (by_torch, "must come from .* `self.manual_backward`"),
    ],
)
def test_what_has_no_meaning_is_refused(train: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(train, ZenFlowStrategy(worker_cores=1, **EXACT))


def clipped_in_closure(module: Manual, batch: Tensor, number: int) -> None:
    optimizer = module.optimizers()

    def closure() -> None:
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    optimizer.step(closure)


def test_a_resumed_run_hides_its_first_closure(tmp_path: Path) -> None:
    """By the weights that its second forward pass sees, with a predicted clip factor."""
    path, whole = tmp_path / "a.ckpt", Manual(clipped_in_closure, scheduled=False)
    saves = After([12], partial(save, path))
    make_trainer(ZenFlowStrategy(worker_cores=1), max_steps=16, max_epochs=2, callbacks=[saves]).fit(whole)
    rest = Manual(clipped_in_closure, scheduled=False)
    make_trainer(ZenFlowStrategy(worker_cores=1), max_steps=16, max_epochs=2).fit(rest, ckpt_path=path)
    assert rest.losses == whole.losses[12:]


def test_the_steps_of_a_batch_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(twice, ZenFlowStrategy(worker_cores=1, **EXACT), callbacks=[StallMonitor()])
    said = caplog.messages[-1]
    assert said.startswith("ZenFlow: 24 steps, median ")
    assert "update in backward in 0.0% of the steps" in said


def test_steps_without_gradients_are_not_measured(tmp_path: Path) -> None:
    """As under torch, they change nothing."""

    def train(module: Manual, batch: Tensor, number: int) -> None:
        if number % 3:
            plain(module, batch, number)
        else:
            module.optimizers().zero_grad()
            module.optimizers().step()

    logger = CSVLogger(tmp_path)
    compare(train, EXACT, logger=logger, log_every_n_steps=1)
    rows = csv.DictReader(Path(logger.experiment.metrics_file_path).read_text().splitlines())
    assert [int(row["step"]) for row in rows] == [step for step in range(12) if step % 3]
