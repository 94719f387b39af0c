"""What users put into a LightningModule: with nothing late, the same numbers as under DeepSpeed's offload and plain Lightning.

Tied and unused weights, layers frozen in turn and activation checkpointing under weight prediction: see test_provisional_update.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from harness import fit
from models import generator
from networks import TiedNet
from side_by_side import NOTHING_LATE, Net, compare, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


class Adapted(Net):
    """A frozen network with an adapter of low rank beside one layer.

    Args:
        give_all: whether the optimizer gets the frozen parameters as well.
    """

    def __init__(self, *, give_all: bool) -> None:
        super().__init__()
        self.give_all = give_all
        self.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, 5 * 7 * 13, generator=generator(9)))
        self.up = nn.Parameter(torch.zeros(11, 2))
        self.hidden.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ self.down.T @ self.up.T)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters() if self.give_all else [self.down, self.up], lr=1e-2)


class Configured(Net):
    """Makes a layer in `configure_model`."""

    @override
    def configure_model(self) -> None:
        if hasattr(self, "late"):
            return
        self.late = nn.Linear(3, 5)
        with torch.no_grad():
            for i, p in enumerate(self.late.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator(10, i)))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) + self.late(torch.ones(2, 3)).square().mean()


class OwnLinear(nn.Linear):
    """torch leaves `compile` of its own layers without effect."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Compiled(Net):
    """A compiled layer, by a backend that traces and differentiates but needs no compiler."""

    def __init__(self) -> None:
        super().__init__()
        hidden = OwnLinear(self.hidden.in_features, self.hidden.out_features)
        hidden.load_state_dict(self.hidden.state_dict())
        hidden.compile(backend="aot_eager")
        self.hidden = hidden

    @override
    def on_train_end(self) -> None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class OddSizes(Net):
    """Parameters without elements, of one element and of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ((0,), (0, 5), (3, 0)))
        self.small = nn.ParameterList(nn.Parameter(torch.full(shape, 0.7)) for shape in ((1,), (1, 1), (1, 7), (7, 1)))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        odd = sum((p * (step % 3 + 1)).sin().sum() for p in [*self.nothing, *self.small])
        return super().loss(step, micro, rank) + odd


class ManyGroups(Net):
    """A parameter group for each parameter, none like another."""

    @override
    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [p],
                "lr": 1e-3 * (i + 1),
                "betas": (0.5 + 0.05 * i, 0.9 + 0.01 * i),
                "eps": 10.0 ** -(4 + i % 4),
                "weight_decay": 0.1 * (i % 3),
            }
            for i, p in enumerate(self.parameters())
        ]
        return torch.optim.AdamW(groups)


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "adapter": lambda: Adapted(give_all=False),
    "adapter, everything given to the optimizer": lambda: Adapted(give_all=True),
    "configure_model": Configured,
    "compiled layer": Compiled,
    "odd sizes": OddSizes,
    "a parameter group each": ManyGroups,
    "tied weights": TiedNet,
    "activation checkpointing": lambda: TiedNet(checkpoint="non-reentrant"),
    "reentrant activation checkpointing": lambda: TiedNet(checkpoint="reentrant"),
    "layers frozen from the start": lambda: TiedNet(frozen=(0, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    compare(MODELS[name], lambda: {"max_steps": 7, "gradient_clip_val": 0.5})


@pytest.mark.parametrize("name", ["adapter, everything given to the optimizer", "tied weights", "odd sizes"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_models_in_bf16(name: str, precision: str) -> None:
    """Master weights in float32 like DeepSpeed's; a difference in their last place tips the rounding to bf16 now and then, by 2^-8."""
    ours, theirs = (
        train(who, MODELS[name], lambda: {"max_steps": 7, "precision": precision}) for who in ("zenflow", "stock")
    )
    total = different = 0
    for key, weight in ours.weights.items():
        torch.testing.assert_close(weight.float(), theirs.weights[key].float(), rtol=2**-7, atol=1e-3)
        total, different = total + weight.numel(), different + int((weight != theirs.weights[key]).sum())
    assert different <= 0.01 * total


class Overflows(Net):
    """A loss so large that the first scale, 65536, and some after it are too large for fp16."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) * 16


@pytest.mark.usefixtures("fp16_on_the_cpu")
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_fp16_with_overflows(precision: str) -> None:
    """As many steps are skipped and halve the loss scale as under DeepSpeed's offload."""
    outcomes = [
        train(who, Overflows, lambda: {"max_steps": 14, "precision": precision, "gradient_clip_val": 0.5})
        for who in ("zenflow", "stock")
    ]
    ours, theirs = outcomes
    assert ours.skipped == theirs.skipped > 0
    assert ours.steps == theirs.steps == 14
    for key, weight in ours.weights.items():
        # fp16 has 11 significant bits.
        torch.testing.assert_close(weight.float(), theirs.weights[key].float(), rtol=2**-9, atol=1e-3)


@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_fp16_with_results_that_are_late() -> None:
    """Steps that overflow change nothing, and provisional updates stay finite."""
    late = {**NOTHING_LATE, "update_interval": 4, "publish_lag": 1}
    ours = train("zenflow", Overflows, lambda: {"max_steps": 14, "precision": "16-mixed"}, late)
    assert ours.skipped > 0
    assert all(math.isfinite(loss) for metrics in ours.metrics for loss in metrics.values())


def test_fp16_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match="Type fp16 is not supported on your device"):
        fit(Net(), precision="16-mixed")


def test_a_compiled_module_is_refused() -> None:
    """By Lightning, as under DeepSpeedStrategy: compile the layers inside it."""
    with pytest.raises(RuntimeError, match="Using a compiled model is incompatible with the current strategy"):
        fit(torch.compile(Net(), backend="eager"))


class Grouped(Net):
    """Two parameter groups, and one more.

    Args:
        scheduled: whether there is a scheduler.
        extra: of the third group.
    """

    def __init__(self, *, scheduled: bool, extra: str) -> None:
        super().__init__()
        self.scheduled = scheduled
        self.extra = list(self.embedding.requires_grad_(False).parameters()) if extra == "frozen" else []

    @override
    def configure_optimizers(self) -> Any:
        groups = [list(self.hidden.parameters()), list(self.head.parameters()), self.extra]
        optimizer = torch.optim.AdamW([{"params": group, "lr": 1e-2 / (i + 1)} for i, group in enumerate(groups)])
        if not self.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


@pytest.mark.parametrize(
    ("scheduled", "extra", "message"),
    [
        (True, "frozen", "parameter group 2: params must be a list with a trainable parameter, got 1 frozen"),
        (False, "frozen", "parameter group 2: params must be a list with a trainable parameter, got 1 frozen"),
        (True, "empty", "parameter group 2: params must be a list with a parameter, got []"),
    ],
)
def test_groups_without_training_are_refused(scheduled: bool, extra: str, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=re.escape(message)):
        fit(Grouped(scheduled=scheduled, extra=extra))


def test_an_empty_group_without_a_scheduler() -> None:
    """And parameters that no group has, which stay as they are."""
    compare(lambda: Grouped(scheduled=False, extra="empty"), lambda: {"max_steps": 5}, others=("stock",))
