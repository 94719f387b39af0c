"""What users put into a LightningModule: with nothing late, the same numbers as under plain Lightning and DeepSpeed's offload, or refused
by name before training.

Tied and unused weights, layers frozen in turn and activation checkpointing under weight prediction: see test_provisional_update.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from typing_extensions import override

from harness import fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import generator
from networks import OddNet, TiedNet
from side_by_side import NOTHING_LATE, Net, assert_same, compare, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


class With(Net):
    """With one more module, whose weights and buffers do not depend on the generator's state, and which adds to the loss.

    Args:
        part: the module, by its name in error messages.
        output: of the module, by step.
    """

    def __init__(self, part: nn.Module, output: Callable[[Any, int], Tensor]) -> None:
        super().__init__()
        self.part, self.output = part, output
        with torch.no_grad():
            for i, p in enumerate([*part.parameters(), *part.buffers()]):
                # Expanded tensors cannot be written.
                if not nn.parameter.is_lazy(p) and 0 not in p.stride():
                    p.copy_(0.3 * torch.randn(p.shape, generator=generator(5, i)) + 0.1)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) + self.output(self.part, step).square().mean()


def only(*parameters: Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(p) for p in parameters)


def inputs(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(6, step))


def with_scalars(*, every: bool = False) -> With:
    """As the `logit_scale` of CLIP; one of them without a gradient in every other step, and one that nothing uses.

    Args:
        every: whether each step uses all of them, multiplied by zero.
    """

    def output(part: Any, step: int) -> Tensor:
        result = inputs(step, 4) * part[0].exp() + (part[1] if step % 2 else 0)
        return result + 0 * (part[1] + part[2]) if every else result

    return With(only(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0)), output)


class Adapted(Net):
    """A frozen network with an adapter of low rank beside one layer; the optimizer gets the frozen parameters as well."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, 5 * 7 * 13, generator=generator(9)))
        self.up = nn.Parameter(torch.zeros(11, 2))
        self.hidden.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ self.down.T @ self.up.T)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


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


class Grouped(Net):
    """A parameter group for each parameter, none like another; or two groups and one more.

    Args:
        extra: of the third group: "frozen" or "no" parameters; None: a group for each parameter.
        scheduled: whether there is a scheduler.
    """

    def __init__(self, *, extra: str | None = None, scheduled: bool = False) -> None:
        super().__init__()
        self.scheduled, self.extra = scheduled, extra
        self.embedding.requires_grad_(extra is None)

    @override
    def configure_optimizers(self) -> Any:
        groups = [[p] for p in self.parameters()]
        if self.extra is not None:
            frozen = list(self.embedding.parameters()) if self.extra == "frozen" else []
            groups = [list(self.hidden.parameters()), list(self.head.parameters()), frozen]
        options = [
            {"lr": 1e-3 * (i + 1), "betas": (0.5 + 0.05 * i, 0.9 + 0.01 * i), "eps": 10.0 ** -(4 + i % 4)}
            for i in range(len(groups))
        ]
        optimizer = torch.optim.AdamW([{"params": g, **o} for g, o in zip(groups, options, strict=True)])
        if not self.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}}


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "adapter": Adapted,
    "configure_model": Configured,
    "compiled layer": Compiled,
    "a parameter group each": Grouped,
    "reentrant activation checkpointing": lambda: TiedNet(checkpoint="reentrant"),
    "layers frozen from the start": lambda: TiedNet(frozen=(0, 2)),
    "scalars": lambda: with_scalars(every=True),
    "odd sizes and strides": OddNet,
    "channels_last": lambda: With(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last),
        lambda part, step: part(inputs(step, 2, 3, 7, 7).to(memory_format=torch.channels_last)),
    ),
    "parametrizations": lambda: With(
        nn.Sequential(weight_norm(nn.Linear(4, 4)), orthogonal(nn.Linear(4, 4)), spectral_norm(nn.Linear(4, 3))),
        lambda part, step: part(inputs(step, 2, 4)),
    ),
    "recurrent": lambda: With(nn.LSTM(4, 5, num_layers=2), lambda part, step: part(inputs(step, 3, 2, 4))[0]),
    "attention": lambda: With(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), lambda part, step: part(inputs(step, 3, 2, 8))
    ),
}


def options() -> dict[str, Any]:
    return {"max_steps": 5, "gradient_clip_val": 0.5}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    compare(MODELS[name], options, others=("plain",), atol=4e-6)


def test_models_beside_deepspeeds_offload() -> None:
    """Tied weights; and parameters that no group has, which stay as they are, beside a group without any."""
    compare(TiedNet, options, others=("stock", "plain"))
    compare(lambda: Grouped(extra="no"), options, others=("stock",))


@pytest.mark.parametrize(("make", "precision"), [(Adapted, "bf16-true"), (TiedNet, "bf16-mixed")])
def test_models_in_bf16(make: Callable[[], pl.LightningModule], precision: str) -> None:
    """Master weights in float32 like DeepSpeed's; a difference in their last place tips the rounding to bf16 now and then, by 2^-8."""
    ours, theirs = (train(who, make, lambda: {"max_steps": 7, "precision": precision}) for who in ("zenflow", "stock"))
    total = different = 0
    for key, weight in ours.weights.items():
        torch.testing.assert_close(weight.float(), theirs.weights[key].float(), rtol=2**-7, atol=1e-3)
        total, different = total + weight.numel(), different + int((weight != theirs.weights[key]).sum())
    assert different <= 0.01 * total


def test_scalars_that_some_steps_do_not_use() -> None:
    """Plain torch leaves such a parameter alone; here, as under ZeRO-2, its gradient is zero."""
    assert_same(train("zenflow", with_scalars, options), train("plain", lambda: with_scalars(every=True), options))


@pytest.mark.parametrize("make", [with_scalars, OddNet])
def test_odd_parameters_in_checkpoints(make: Callable[[], pl.LightningModule], tmp_path: Path) -> None:
    """A resumed run ends with the bits of the one that saved, and exports have the parameters' shapes."""
    keys = {"update_interval": 4, "publish_lag": 1, "provisional_scale": 0, "weight_prediction": 0}
    model, resumed = make(), make()
    trainer = fit(model, ZenFlowStrategy(**keys), steps=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    make_trainer(ZenFlowStrategy(**keys), max_steps=4).fit(resumed, ckpt_path=tmp_path / "a.ckpt")
    exported = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "a.ckpt", tmp_path / "a.pt")["state_dict"]
    for (name, p), ours in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert p.shape == ours.shape and torch.equal(p, ours), name
        assert torch.equal(exported[name], p), name


class Overflows(Net):
    """A loss so large that the first scale, 65536, and some after it are too large for fp16."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return super().loss(step, micro, rank) * 16


@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_fp16_with_overflows() -> None:
    """As many steps are skipped and halve the loss scale as under DeepSpeed's offload."""
    sixteen = {"max_steps": 14, "precision": "16-true", "gradient_clip_val": 0.5}
    ours, theirs = (train(who, Overflows, lambda: dict(sixteen)) for who in ("zenflow", "stock"))
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


class Elsewhere(Net):
    """A parameter that only the optimizer has."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), nn.Parameter(torch.ones(3, 2))])


def sum_of(part: nn.Module, step: int) -> Tensor:
    return torch.stack([p.abs().sum() for p in part.parameters()])


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotations", torch.ones(3, dtype=torch.complex64))


REFUSED: dict[str, tuple[Callable[[], pl.LightningModule], str]] = {
    "a parameter of the optimizer only": (
        Elsewhere,
        r"group 0: params must be parameters of the module, got one of shape \[3, 2\] at place 9; make it an attribute",
    ),
    "complex weights": (
        lambda: With(only(torch.ones(3, dtype=torch.complex64)), sum_of),
        r"part.0 must be a real tensor .*, got torch.complex64: its imaginary part would be lost; .*view_as_real",
    ),
    "complex buffers": (lambda: With(Buffered(), sum_of), r"part.rotations must be a real tensor .* torch.complex64"),
    "expanded weights": (
        lambda: With(only(torch.ones(1, 3).expand(2, 3)), sum_of),
        r"part.0 must have memory for each of its elements, .*, got an expanded tensor: .*expand it in `forward`",
    ),
    "two parameters in the same memory": (
        lambda: With(only(*[torch.ones(3)] * 2), sum_of),
        r"part.1 must have memory .*, got that of part.0: to share weights, assign the parameter itself",
    ),
    "double precision": (
        lambda: With(nn.Linear(3, 2).double(), sum_of),
        r"part.weight must .* at most 32 bits, got torch.float64",
    ),
    "a frozen group": (
        lambda: Grouped(extra="frozen"),
        r"parameter group 2: params must be a list with a trainable parameter, got 1 frozen",
    ),
    "an empty group with a scheduler": (
        lambda: Grouped(extra="no", scheduled=True),
        r"parameter group 2: params must be a list with a trainable parameter, got 0 frozen or empty ones",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=message):
        fit(make())
