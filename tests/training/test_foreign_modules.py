"""Modules as libraries make them: trained with AdamW's numbers, or refused by name before training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from typing_extensions import override

from harness import fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import generator
from side_by_side import Net, assert_same, compare, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


class With(Net):
    """With one more module, whose weights and buffers do not depend on the generator's state, and which adds to the loss.

    Args:
        part: the module, by its name in error messages.
        output: of the module, by step.
    """

    def __init__(self, part: nn.Module, output: Callable[[nn.Module, int], Tensor]) -> None:
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


def with_strides() -> With:
    """Transposed and sliced parameters, some of them vectors or frozen."""
    vectors = (torch.ones(8)[::2], torch.ones(4, 3)[:, 1], torch.ones(4, 5)[:, :1])
    part = only(torch.ones(3, 4).t(), torch.ones(6, 4)[::2], torch.ones(4, 1).expand(4, 3).t(), *vectors)
    part[2].requires_grad_(False)  # type: ignore[index]
    part[4].requires_grad_(False)  # type: ignore[index]

    def output(p: Any, step: int) -> Tensor:
        return (inputs(step, 2, 4) @ p[0]) @ (p[1] * p[2] * (p[3] + p[4] + p[5].t()))

    return With(part, output)


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "scalars": lambda: with_scalars(every=True),
    "strides": with_strides,
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
def test_trained_as_under_plain_lightning(name: str) -> None:
    compare(MODELS[name], options, others=("plain",), atol=4e-6)


def test_scalars_that_some_steps_do_not_use() -> None:
    """Plain torch leaves such a parameter alone; here, as under ZeRO-2, its gradient is zero."""
    assert_same(train("zenflow", with_scalars, options), train("plain", lambda: with_scalars(every=True), options))


@pytest.mark.parametrize("keys", [{"update_interval": 4, "publish_lag": 1}, {"update_interval": 1, "publish_lag": 0}])
def test_scalars_in_checkpoints(keys: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run ends with the bits of the one that saved, and exports have the parameters' shapes."""
    keys = {**keys, "provisional_scale": 0, "weight_prediction": 0}
    model, resumed = with_scalars(), with_scalars()
    trainer = fit(model, ZenFlowStrategy(**keys), steps=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    make_trainer(ZenFlowStrategy(**keys), max_steps=4).fit(resumed, ckpt_path=tmp_path / "a.ckpt")
    for (name, p), ours in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert p.shape == ours.shape and torch.equal(p, ours), name
    exported = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "a.ckpt", tmp_path / "a.pt")["state_dict"]
    for name, p in model.named_parameters():
        assert torch.equal(exported[name], p), name


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
        r"part.0 must have memory for each of its elements, got an expanded tensor: .*expand it in `forward`",
    ),
    "two parameters in the same memory": (
        lambda: With(only(*[torch.ones(3)] * 2), sum_of),
        r"part.1 must have memory of its own, got that of part.0, .*: to share weights, assign the parameter itself",
    ),
    "double precision": (
        lambda: With(nn.Linear(3, 2).double(), sum_of),
        r"part.weight must .* at most 32 bits, got torch.float64",
    ),
    "lazy layers": (
        lambda: With(nn.LazyLinear(3), sum_of),
        r"part.weight must be .*, got an uninitialized one: run the module on one batch before",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=message):
        fit(make())
