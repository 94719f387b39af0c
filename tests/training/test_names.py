"""Strategies by name and several Trainers in a process, as programs use them that wrap Lightning."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException as LightningsException
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from harness import make_trainer
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from models import generator
from side_by_side import NOTHING_LATE, Net

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

NAMES = ("zenflow", "zenflow_adamw")
CLIPPED = {"max_steps": 20, "gradient_clip_val": 0.02}
"""Every step of `Net` is clipped."""


class Wrapped(Net):
    """Its losses, and what a wrapper calls in further Trainers."""

    def __init__(self, *, noise: float = 0.0) -> None:
        super().__init__(length=20)
        self.losses: list[float] = []
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.add_(noise * torch.randn(p.shape, generator=generator(9, i)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        return self.loss(10_000 + int(batch), 0, 0)

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert optimizer is self.trainer.optimizers[0]

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()

    test_dataloader = predict_dataloader


def losses(strategy: Any, *, noise: float = 0.0) -> Tensor:
    model = Wrapped(noise=noise)
    make_trainer(strategy, **CLIPPED).fit(model)
    return torch.tensor(model.losses)


def test_zenflow_adamw_has_adamws_losses() -> None:
    """Of every step, though each is clipped: the bits of weights that wait for the worker, to rounding those of torch's AdamW."""
    ours, adamw = losses("zenflow_adamw"), losses("auto")
    assert torch.equal(ours, losses(ZenFlowStrategy(**NOTHING_LATE)))
    relative = lambda others: float(((others - adamw) / adamw).abs().max())  # noqa: E731
    assert relative(ours) < 3 * relative(losses("auto", noise=1e-7))
    predicted = relative(losses(ZenFlowStrategy(update_interval=1, publish_lag=0)))
    assert predicted > 100 * relative(ours), "no step is clipped"


class Drawn(Wrapped):
    """Random batches, and a random number in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = [float(torch.rand(()))]

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(range(self.length), shuffle=True)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn += [float(batch), float(torch.rand(()))]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_batches_of_auto(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what docs/faq.md says, and not without."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")  # seed_everything leaves it

    def drawn(strategy: str, *, again: bool = True, **options: Any) -> list[float]:
        seed_everything(1)
        model = Drawn()
        trainer = make_trainer(strategy, max_epochs=2, **options)
        if again:
            seed_everything(1)
        trainer.fit(model)
        return model.drawn

    expected = drawn("auto")
    assert drawn(name) == expected
    assert drawn(name, use_distributed_sampler=True) != expected
    assert drawn(name, again=False) == expected != drawn("auto", again=False)


def test_names_of_fabric() -> None:
    zenflow, adamw = (Fabric(accelerator="cpu", devices=1, strategy=name).strategy for name in NAMES)
    assert zenflow.zenflow_config == ZenFlowConfig()  # type: ignore[attr-defined]
    assert adamw.zenflow_config == ZenFlowConfig(update_interval=1, publish_lag=0, clip_prediction=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_name", [True, False])
def test_several_trainers(by_name: bool) -> None:
    """Each with options of its own: fit, then evaluation of the same module, another fit of it, and further modules in turn."""
    kept = ZenFlowStrategy(**NOTHING_LATE)
    strategy = "zenflow_adamw" if by_name else kept
    model, plain = Wrapped(), Wrapped()
    for who, module in ((strategy, model), ("auto", plain)):
        make_trainer(who, max_steps=3, gradient_clip_val=0.02).fit(module)
        make_trainer(who, max_steps=4, accumulate_grad_batches=2).fit(module)
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)
    predicted = make_trainer(strategy).predict(model)
    assert predicted is not None and [float(loss) for loss in predicted] == [float(model.loss(10_000, 0, 0).detach())]
    tested = make_trainer(strategy).test(model, verbose=False)
    assert tested == make_trainer(strategy, limit_val_batches=1.0).validate(model, verbose=False)
    folds = []
    for _ in range(2):
        module = Wrapped()
        make_trainer(strategy, max_steps=3, gradient_clip_val=0.02).fit(module)
        folds.append(module.losses)
    assert folds[0] == folds[1] == model.losses[:3]
    in_bf16 = make_trainer(strategy, max_steps=1, precision="bf16-true")
    in_bf16.fit(Wrapped())
    assert in_bf16.strategy.config["bf16"]["enabled"]  # type: ignore[attr-defined]


def test_what_the_strategy_was_given_itself_is_kept() -> None:
    with pytest.raises(LightningsException, match="accelerator set through both strategy class and accelerator"):
        make_trainer(ZenFlowStrategy(accelerator=CPUAccelerator()))
    plugin = DeepSpeedPrecision("bf16-true")
    strategy = ZenFlowStrategy(precision_plugin=plugin)
    for _ in range(2):
        assert make_trainer(strategy).precision_plugin is plugin
