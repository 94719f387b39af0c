"""Types that the user's program chooses: torch's default, those of batches; `moments_dtype: bfloat16` and `int8`, with which the state has
the bits of the oracle, whose moments are rounded once a window.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from callbacks import At
from checkpoint_files import zero_state
from fabric_runs import set_up
from harness import UP_TO_TWO, Case, Run, fit, optimizer_of, run_here, weights_of
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from models import SHAPES, TestModule, generator, hyperparameters
from networks import SmallNet
from same_bits import assert_is_adamw, assert_same_tensors
from side_by_side import LATE, NOTHING_LATE
from stage3_runs import PiecesNet


class OwnTypes(TestModule):
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
        return DataLoader(
            [sample] * 4, collate_fn=lambda samples: {**default_collate(samples), "rows": Bundle(samples)}
        )

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


SHORT = ("bfloat16", "int8")
CASE = Case(topk_ratio=0.0, steps=11, model_options={"shapes": SHAPES[:6]}, loop="direct")
"""The gradients do not depend on the weights. The last parameter of the model, which has none in every second step, is left out: its block
is then submitted at the end of the step, with another window."""


ONE, TWO = (replace(CASE, update_interval=s, publish_lag=0) for s in (1, 2))
NOT_FINITE = {**CASE.model_options, "not_finite": {(4, 0): math.nan, (6, 0): math.inf}}
CASES = {
    "S=2, d=0, columns on the device": replace(TWO, topk_ratio=0.3),
    "flushes, one behind": replace(TWO, flush_after=(3, 4, 8), max_norm=0.5),
    "not finite": replace(ONE, model_options=NOT_FINITE, max_norm=0.5),
    "freezing": replace(ONE, model_options={**CASE.model_options, "frozen_in": {0: (2, 4), 3: (3, 100)}}),
    "two threads": ONE.with_keys(worker_cores=UP_TO_TWO),
    "slow first moments": replace(
        TWO,
        publish_lag=1,
        optimizer=replace(CASE.optimizer, given=[hyperparameters(lr=1e-2, beta1=b) for b in (0.999, 0.9)]),
    ),
}
"""What lies between these, tests/fuzz draws."""


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_oracle(name: str, dtype: str) -> None:
    case = CASES[name].with_keys(moments_dtype=dtype)
    assert_is_adamw(case, run_here(case))


def assert_loaded(run: Run, saved: Run, dtype: str) -> None:
    """The moments of `run`, which is of this type, are those of `saved`, rounded; how: tests/unit/worker/test_moments."""
    for kind in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in zip(getattr(run, kind), getattr(saved, kind), strict=True):
            if dtype == "int8":
                torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=float(theirs.abs().max()) / 100)
            else:
                assert torch.equal(ours, theirs.to(getattr(torch, dtype)).float())


def test_checkpoints_hold_float32_and_runs_with_any_type_load_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that loads another type takes the exact state, or rounds it once to nearest.

    What is saved is the arena's memory, or a file's; torch's loading, which would convert all moments at once, is not called.
    """
    saved: dict[str, Run] = {}

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("torch's loading was called")

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", refuse)
    found, short, dtypes = list[Tensor](), replace(CASE, steps=5, loop="trainer"), ("float32", *SHORT)

    def find(trainer: Any) -> None:
        """DeepSpeed's own way to the moments after a flush; those that a checkpoint would hold are the arena's memory."""
        parameters = [p for group in trainer.lightning_module.parameter_groups() for p in group]
        found[:] = [safe_get_full_optimizer_state(p, "exp_avg_sq") for p in parameters]
        arena = optimizer_of(trainer).training.parts.rank.arena
        states = optimizer_of(trainer).state_dict()["base_optimizer_state"]["state"].values()
        for kind in ("exp_avg", "exp_avg_sq"):
            of_arena = getattr(arena, kind).array
            own = {state[kind].untyped_storage().data_ptr() for state in states}
            assert (own == {of_arena.untyped_storage().data_ptr()}) != (of_arena.dtype in (torch.uint8, torch.int8))

    for dtype in dtypes:
        case = replace(short, save_at=5, checkpoint=str(tmp_path / dtype)).with_keys(moments_dtype=dtype)
        saved[dtype] = run_here(case, callbacks=[At("on_train_end", find)])
        for state in zero_state(tmp_path / dtype)["base_optimizer_state"]["state"].values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        of_rank = SavedCheckpoint(tmp_path / dtype).optimizer_state(0)["base_optimizer_state"]["state"]
        in_file = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert all(of_group["exp_avg"].dtype == in_file for of_group in of_rank.values())
        assert_same_tensors(found, [x.float() for x in saved[dtype].exp_avg_sq], "what DeepSpeed finds")
    for ours, theirs in (("float32", "int8"), ("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "int8")):
        run = run_here(replace(short, checkpoint=str(tmp_path / theirs)).with_keys(moments_dtype=ours))
        assert_same_tensors(run.master, saved[theirs].master, "master")
        assert_loaded(run, saved[theirs], ours)
        for kind in ("exp_avg", "exp_avg_sq") if ours == theirs else ():
            assert_same_tensors(getattr(run, kind), getattr(saved[theirs], kind), kind)
