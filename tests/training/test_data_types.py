"""Types that the user's program chooses: torch's default, those of batches."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from callbacks import At
from fabric_runs import set_up
from harness import fit, weights_of
from lightning_zenflow import ZenFlowStrategy
from models import generator
from networks import SmallNet
from side_by_side import LATE, NOTHING_LATE
from stage3_runs import PiecesNet


class OwnTypes(pl.LightningModule):
    """A module that names the type of all that it makes.

    Args:
        default: torch's default from the second step on; None: unchanged.
    """

    def __init__(self, default: torch.dtype | None = None) -> None:
        super().__init__()
        self.default = default
        # A prime width, so that blocks cut in mid-row.
        self.layers = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 3)).float()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator(1, i), dtype=torch.float32))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.default is not None:
            torch.set_default_dtype(self.default)
        x = torch.randn(8, 13, generator=generator(2, batch_idx), dtype=torch.float32)
        return self.layers(x).square().mean()

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(10))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """torch's own after each test."""
    yield
    torch.set_default_dtype(torch.float32)


HOW: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "in backward": (torch.float64, {"update_interval": 1, "publish_lag": 0, "worker_cores": 1}),
    "late": (
        torch.bfloat16,
        {**LATE, "select_interval": 2, "full_warm_up_rounds": 0, "moments_dtype": "bfloat16", "accumulate_on": "host"},
    ),
    "in host memory": (torch.bfloat16, {"stage": 3, "offload_parameters": True, "worker_cores": 1}),
}


@pytest.mark.parametrize("how", HOW)
def test_torchs_default_changes_no_bit(how: str, tmp_path: Any) -> None:
    """Neither when it is set before the fit nor when it changes in a step; checkpoints of such runs go on."""
    default, keys = HOW[how]
    ends = []
    for before, later in ((torch.float32, None), (default, None), (torch.float32, default)):
        torch.set_default_dtype(before)
        model = OwnTypes(later)
        options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        trainer = fit(model, ZenFlowStrategy(**keys), steps=3, **options)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        torch.set_default_dtype(before)
        resumed = OwnTypes(later)
        fit(resumed, ZenFlowStrategy(**keys), steps=5, resume=tmp_path / "a.ckpt", **options)
        ends.append((weights_of(model), weights_of(resumed)))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


class Bundle:
    """What knows how it moves, and no other conversion, as a `TensorDict` whose elements are of several types."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def to(self, device: torch.device, **_: Any) -> "Bundle":
        assert isinstance(device, torch.device)
        return self


def bundled(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {**default_collate(samples), "rows": Bundle(samples)}


class Sees(OwnTypes):
    """Keeps the batch that it gets, and trains on it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        (row, *_) = batch["rows"].rows  # type: ignore[attr-defined]
        self.seen = {key: torch.cat([batch[key].flatten(), row[key].flatten()]) for key in row}
        x = batch["x"] if self.trainer.precision.endswith("mixed") else batch["x"].to(self.layers[0].weight.dtype)
        return torch.nn.functional.mse_loss(self.layers(x), batch["target"].to(x.dtype))

    validation_step = training_step

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        sample = {
            "x": torch.randn(13, generator=generator(3), dtype=torch.float32),
            "target": torch.full((3,), 1003.25, dtype=torch.float32),
            "time": torch.tensor(1764086400.123456, dtype=torch.float64),
            "number": torch.tensor(2**40 + 1, dtype=torch.int64),
        }
        return DataLoader([sample] * 4, collate_fn=bundled)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(("precision", "stage"), [("32-true", 3), ("bf16-mixed", 2), ("bf16-true", 3)])
def test_batches_arrive_as_under_plain_lightning(precision: Any, stage: int) -> None:
    ours, theirs = Sees(), Sees()
    for module, strategy in ((ours, ZenFlowStrategy(**NOTHING_LATE, stage=stage)), (theirs, "auto")):
        fit(module, strategy, precision=precision, limit_val_batches=1)
    torch.testing.assert_close(ours.seen, theirs.seen, rtol=0, atol=0)


@pytest.mark.parametrize(("precision", "stage"), [("bf16-mixed", 2), ("16-mixed", 3)])
def test_buffers_in_float32_beside_weights_of_16_bits(precision: Any, stage: int) -> None:
    """The statistics of norms are float32, as under plain Lightning. For each operation: tests/unit/core/test_autocast."""
    ends = []
    for strategy in (ZenFlowStrategy(**NOTHING_LATE, stage=stage), "auto"):
        module = PiecesNet()
        trainer = fit(module, strategy, steps=4, precision=precision, limit_val_batches=1)
        ends.append((dict(module.named_buffers()), trainer.predict(module)))
    assert all(b.dtype in (torch.float32, torch.int64) for b in ends[0][0].values())
    torch.testing.assert_close(*ends, rtol=0.05, atol=0.05)


def test_inputs_under_fabric() -> None:
    fabric, model, _, _ = set_up(SmallNet(), **NOTHING_LATE)
    x = torch.full((2, 3), 1 + 2**-40, dtype=torch.float64)
    model.module.forward = lambda value: value
    assert torch.equal(model(x), x) and model(x).dtype == torch.float64
    fabric.strategy.teardown()


class OtherTypes(OwnTypes):
    """Has integers before all else, and frozen parameters and buffers of other types.

    Args:
        trains: whether the parameters of another type are trained.
    """

    def __init__(self, *, trains: bool = False) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(12, dtype=torch.uint8), requires_grad=False)
        self.short = nn.Parameter(torch.full((13,), 0.5, dtype=torch.bfloat16), requires_grad=trains)
        self.register_buffer("long", torch.tensor(1 + 2**-40, dtype=torch.float64))
        self.register_buffer("mean", torch.full((13,), 0.5, dtype=torch.bfloat16))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.randn(8, 13, generator=generator(2, batch_idx), dtype=torch.float32) * self.short.float()
        return self.layers(x * (self.codes.float().mean() / 6)).square().mean() * self.long.float()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_types_of_what_is_trained_and_is_not(
    stage: int, trains: bool, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """What is not trained keeps its type. What is trained is float32 in training, and so are buffers beside it, such as running means;
    afterwards it has its type again, and the weights of a training in float32.
    """
    ours, theirs, resumed = (OtherTypes(trains=trains) for _ in range(3))
    types, seen = {name: t.dtype for name, t in ours.state_dict().items()}, set[torch.dtype]()
    if trains:
        theirs.short, theirs.mean = nn.Parameter(theirs.short.detach().float()), theirs.mean.float()
    look = At("on_train_batch_end", lambda t: seen.update({ours.short.dtype, ours.mean.dtype}))
    trainer = fit(ours, ZenFlowStrategy(**NOTHING_LATE, stage=stage), callbacks=[look])
    fit(theirs, "auto")
    assert seen == {torch.float32 if trains else torch.bfloat16}
    assert ("1 trained parameters are float32 in training" in caplog.text) == trains
    expected = {name: t.to(types[name]) for name, t in theirs.state_dict().items()}
    torch.testing.assert_close(dict(ours.state_dict()), expected, rtol=0, atol=2e-6)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]
    assert trains or {name: t.dtype for name, t in saved.items()} == types
    fit(resumed, ZenFlowStrategy(**NOTHING_LATE, stage=stage), steps=4, resume=tmp_path / "a.ckpt")
    assert {name: t.dtype for name, t in resumed.state_dict().items()} == types
