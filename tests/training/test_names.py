"""Strategies by name and several Trainers in a process, as programs use them that wrap Lightning."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException as LightningsException
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from typing_extensions import override

from harness import make_trainer
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from models import generator
from side_by_side import NOTHING_LATE, Net

NAMES = ("zenflow", "zenflow_adamw")
CLIPPED = {"max_steps": 12, "gradient_clip_val": 0.02}
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
    """Of every step, though each is clipped: to rounding those of torch's AdamW, the bits of weights that wait for the worker."""
    ours, adamw = losses("zenflow_adamw"), losses("auto")
    assert torch.equal(ours, losses(ZenFlowStrategy(**NOTHING_LATE)))
    relative = lambda others: float(((others - adamw) / adamw).abs().max())  # noqa: E731
    in_host_memory = losses(ZenFlowStrategy(stage=3, offload_parameters=True))
    assert max(map(relative, (ours, in_host_memory))) < 3 * relative(losses("auto", noise=1e-7))
    predicted = relative(losses(ZenFlowStrategy(update_interval=1, publish_lag=0)))
    assert predicted > 100 * relative(ours), "no step is clipped"


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(range(20), batch_size=3, shuffle=True),
    "generator": lambda: DataLoader(range(20), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)),
    # As scvi-tools' dataset, which takes a batch of indices at once.
    "index batches": lambda: DataLoader(
        AtOnce(), sampler=BatchSampler(RandomSampler(range(20)), 3, drop_last=True), batch_size=None
    ),
}


class AtOnce(Dataset[Tensor]):
    """Takes many indices at once."""

    def __len__(self) -> int:
        return 20

    @override
    def __getitem__(self, index: Any) -> Tensor:
        assert isinstance(index, list)
        return torch.tensor(index)


class Drawn(Wrapped):
    """Notes its batches, and a random number in each step."""

    def __init__(self, loader: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.loader = loader
        self.drawn: list[Any] = [float(torch.rand(()))]

    @override
    def train_dataloader(self) -> Any:
        return self.loader()

    val_dataloader = predict_dataloader = train_dataloader

    def note(self, batch: Tensor) -> Tensor:
        self.drawn += [batch.tolist(), float(torch.rand(()))]
        return batch[0]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.note(batch), batch_idx)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(self.note(batch), batch_idx)

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        return super().predict_step(self.note(batch))


@pytest.fixture
def keeps_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's variables afterwards as they were: `seed_everything` leaves them."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")


@pytest.mark.usefixtures("keeps_seed")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_seed_gives_the_batches_of_auto(kind: str) -> None:
    """One rank has all batches: nothing is distributed, no sampler replaced, and no seed set again."""

    def drawn(strategy: str) -> list[Any]:
        seed_everything(1)
        model = Drawn(LOADERS[kind])
        trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=True, limit_val_batches=1.0)
        trainer.fit(model)
        trainer.predict(model)
        assert os.environ["PL_GLOBAL_SEED"] == "1"
        return model.drawn

    assert drawn("zenflow") == drawn("auto")


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


class UsersPrecision(DeepSpeedPrecision):
    """A plugin of the user's."""


def test_what_the_strategy_was_given_itself_is_kept() -> None:
    with pytest.raises(LightningsException, match="accelerator set through both strategy class and accelerator"):
        make_trainer(ZenFlowStrategy(accelerator=CPUAccelerator()))
    own = UsersPrecision("bf16-true")
    for plugin in (DeepSpeedPrecision("bf16-true"), own):
        strategy = ZenFlowStrategy(precision_plugin=plugin)
        for _ in range(2):
            used = make_trainer(strategy).precision_plugin
            # Lightning's own class only says which precision it is.
            assert used is own if plugin is own else used.precision == "bf16-true"
