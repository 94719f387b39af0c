"""What users put into a LightningModule and a Trainer: with nothing late, the same numbers as plain Lightning's and DeepSpeed's offload's.

Tied and unused weights, layers frozen in turn and activation checkpointing under weight prediction: see test_provisional_update.
What is refused: see test_refused_at_setup.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelPruning
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from models import generator
from networks import OddNet, TiedNet
from side_by_side import NOTHING_LATE, Net, compare, train


class Adapted(Net):
    """A frozen network with an adapter of low rank beside one layer, made late; the optimizer gets the frozen parameters as well."""

    @override
    def configure_model(self) -> None:
        if hasattr(self, "down"):
            return
        self.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, 5 * 7 * 13, generator=generator(9)))
        self.up = nn.Parameter(torch.zeros(11, 2))
        self.hidden.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ self.down.T @ self.up.T)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OwnLinear(nn.Linear):
    """torch leaves `compile` of its own layers without effect."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Grouped(Net):
    """A parameter group for each parameter, none like another, and a layer compiled by a backend that needs no compiler."""

    def __init__(self) -> None:
        super().__init__()
        hidden = OwnLinear(self.hidden.in_features, self.hidden.out_features)
        hidden.load_state_dict(self.hidden.state_dict())
        hidden.compile(backend="aot_eager")
        self.hidden = hidden

    @override
    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [p],
                "lr": 1e-3 * (i + 1),
                "betas": (0.5 + 0.05 * i, 0.9 + 0.01 * i),
                "eps": 10.0 ** -(4 + i % 4),
            }
            for i, p in enumerate(self.parameters())
        ]
        return torch.optim.AdamW(groups)

    @override
    def on_train_end(self) -> None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class Partial(Net):
    """Parameters that no group has, which stay as they are."""

    @override
    def configure_optimizers(self) -> Any:
        self.embedding.requires_grad_(False)
        groups = [list(self.hidden.parameters()), list(self.head.parameters())]
        return torch.optim.AdamW([{"params": g, "lr": 1e-3 * (i + 1)} for i, g in enumerate(groups)])


@pytest.mark.parametrize(
    ("make", "other"),
    [(Adapted, "plain"), (Grouped, "plain"), (OddNet, "plain"), (TiedNet, "plain"), (TiedNet, "stock"),
     (Partial, "stock")],
)  # fmt: skip
def test_models(make: Any, other: Any) -> None:
    compare(make, lambda: {"max_steps": 5, "gradient_clip_val": 0.5}, others=(other,), atol=4e-6)


def test_weights_of_odd_layouts_in_checkpoints(tmp_path: Path) -> None:
    """A resumed run ends with the bits of the one that saved, and exports have the parameters' shapes."""
    keys = {"update_interval": 4, "publish_lag": 1, "provisional_scale": 0, "weight_prediction": 0}
    model, resumed = OddNet(), OddNet()
    make = partial(ZenFlowStrategy, **keys, checkpoint_format="deepspeed")
    fit(model, make(), steps=4).save_checkpoint(tmp_path / "a.ckpt")
    fit(resumed, make(), steps=4, resume=tmp_path / "a.ckpt")
    exported = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "a.ckpt", tmp_path / "a.pt")["state_dict"]
    for (name, p), ours in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert p.shape == ours.shape and torch.equal(p, ours), name
        assert torch.equal(exported[name], p), name


class Overflows(Net):
    """A loss so large that the first scale, 65536, and some after it are too large for fp16."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) * 16


def test_fp16() -> None:
    """As many steps are skipped and halve the loss scale as under DeepSpeed's offload; provisional updates stay finite."""
    sixteen = {"max_steps": 14, "precision": "16-true", "gradient_clip_val": 0.5}
    ours, theirs = (train(who, Overflows, lambda: dict(sixteen)) for who in ("zenflow", "stock"))
    assert ours.skipped == theirs.skipped > 0
    assert ours.steps == theirs.steps == 14
    for key, weight in ours.weights.items():
        # fp16 has 11 significant bits.
        torch.testing.assert_close(weight.float(), theirs.weights[key].float(), rtol=2**-9, atol=1e-3)
    # What has been submitted before a gradient overflows would be shown with a step that is skipped.
    without_clipping = {"max_steps": 14, "precision": "16-true"}
    exact, adamw = (
        train("zenflow", Overflows, lambda: dict(without_clipping), {**NOTHING_LATE, **keys})
        for keys in ({}, {"overlap_step": True, "clip_prediction": False})
    )
    assert exact.skipped > 0
    assert exact.metrics == adamw.metrics
    late = {**NOTHING_LATE, "update_interval": 4, "publish_lag": 1}
    run = train("zenflow", Overflows, lambda: {"max_steps": 14, "precision": "16-mixed"}, late)
    assert run.skipped > 0
    assert all(math.isfinite(loss) for metrics in run.metrics for loss in metrics.values())


class Loaded(Net):
    """Counts how often its loader is asked for.

    Args:
        loader: makes the loader.
        **options: as `Net`.
    """

    def __init__(self, loader: Callable[[], Any], **options: Any) -> None:
        super().__init__(**options)
        self.loader, self.asked = loader, 0

    @override
    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.loader()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.tensor(batch_idx), batch_idx)


class Stream(IterableDataset[int]):
    """Of unknown length: that a batch was the last one shows when the next one is asked for."""

    @override
    def __iter__(self) -> Any:
        return iter(range(7))


def epoch_of(n: int = 4) -> DataLoader[int]:
    return DataLoader(range(n))


def scheduled(kind: type, *arguments: Any, every: str = "step", **options: Any) -> Callable[[Any], dict[str, Any]]:
    """Makes what `configure_optimizers` returns as "lr_scheduler"."""
    return lambda optimizer: {"scheduler": kind(optimizer, *arguments, **options), "interval": every, "frequency": 1}


EVERY_EPOCH = scheduled(lr_scheduler.StepLR, 1, 0.5, every="epoch")
RESTARTS = scheduled(lr_scheduler.CosineAnnealingWarmRestarts, 3)
# Changes beta1 as well.
CYCLE = scheduled(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=13)
PLATEAU = scheduled(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.3, threshold=0.2, every="epoch")
PRUNING: dict[str, Any] = {"parameter_names": ["weight"], "amount": 0.3, "use_lottery_ticket_hypothesis": False}
ACCUMULATED = {"max_epochs": 3, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
LOOPS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[], Any], dict[str, Any]]] = {
    "max_steps in mid-epoch, without batches": (
        lambda optimizer: {**scheduled(lr_scheduler.ExponentialLR, 0.8)(optimizer), "frequency": 2},
        lambda: DataLoader(range(4), batch_size=None),
        {"max_steps": 6, "gradient_clip_val": 0.5},
    ),
    "stopped early": (
        lambda optimizer: {**PLATEAU(optimizer), "monitor": "val_loss"},
        epoch_of,
        {"max_epochs": 30, "limit_val_batches": 1, "callbacks": [EarlyStopping("val_loss", 0.05, patience=2)]},
    ),
    "a list of batches, validated in mid-epoch": (
        RESTARTS,
        lambda: DataLoader(range(4), batch_sampler=[[0], [1, 2], [3], [0]]),
        {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1},
    ),
    "no loader at all": (EVERY_EPOCH, lambda: range(4), {"max_epochs": 2, "barebones": True}),
    "no steps": (EVERY_EPOCH, epoch_of, {"max_steps": 0}),
    "a short test run": (CYCLE, epoch_of, {"fast_dev_run": 2}),
    # The module has the pruned weights after `fit`; without `make_pruning_permanent` it keeps the masks.
    **{
        f"pruned, permanently: {permanent}": (
            EVERY_EPOCH,
            epoch_of,
            {
                "max_epochs": 2,
                "callbacks": [ModelPruning("l1_unstructured", make_pruning_permanent=permanent, **PRUNING)],
            },
        )
        for permanent in (True, False)
    },
    # The last micro-batches of an epoch make a step; the loss is divided by `accumulate_grad_batches` whatever is left.
    "ends in mid-accumulation": (CYCLE, lambda: epoch_of(7), ACCUMULATED),
    "a stream ends in mid-accumulation": (CYCLE, lambda: DataLoader(Stream()), ACCUMULATED),
    "ends before an accumulation": (CYCLE, lambda: epoch_of(7), {**ACCUMULATED, "accumulate_grad_batches": 9}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_schedulers_loaders_and_loops(name: str) -> None:
    scheduler, loader, options = LOOPS[name]
    made: list[Loaded] = []

    def make() -> Loaded:
        made.append(Loaded(loader, scheduler=scheduler))
        return made[-1]

    ours = compare(make, lambda: deepcopy(options), others=("plain", "stock") if "accumulation" in name else ("plain",))
    assert {model.asked for model in made} <= {1} or ours.steps == 0
    if name == "stopped early":
        assert 1 < ours.epochs < 30 and len({rates[0] for rates in ours.learning_rates}) > 1


class TwoSchedulers(Net):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        return [optimizer], [EVERY_EPOCH(optimizer), {**PLATEAU(optimizer), "monitor": "val_loss"}]


def test_two_schedulers_of_one_optimizer() -> None:
    options = {"max_epochs": 6, "limit_val_batches": 1}
    ours = compare(TwoSchedulers, lambda: deepcopy(options), others=("plain",))
    assert ours.learning_rates[-1][0] < ours.learning_rates[0][0] * 0.5**5
