"""ZeRO stage 3: cases of other tests with pieces of every parameter, several sub-groups, and small parameters that stay gathered.

All cases of a number of ranks run in the same processes, as in test_ranks.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from test_equivalence import ACCUMULATED, BF16, FLUSHES, MIXED, case_of
from test_foreign_state import State, assert_found
from test_training import CASES as LATE
from test_training import compare_with_oracle
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

from harness import AUTO, EVERYTHING, Case, Run, make_trainer
from models import OptimizerOptions, generator
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import assert_close_to_adamw, assert_is_adamw, assert_same_run, assert_same_state, assert_same_tensors

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def in_stage_3(case: Case, **options: Any) -> Case:
    return replace(case, **{"stage": 3, "loop": "trainer", **options})


OF_ADAMW = {
    name: in_stage_3(case)
    for name, case in {
        "S=1, d=0, clipped": case_of(BF16, 0, 1, 0),
        "S=4, d=1, top-k": case_of("fp32", 0.05, 4, 1).with_keys(reduce_bucket_size=400),
        "S=4, d=1, top-k, flushes": case_of(BF16, 0.05, 4, 1, **FLUSHES),
        "bf16-mixed, Adam": case_of(MIXED, 0.5, 4, 1),
        "everything": case_of(ACCUMULATED, 0.3, 4, 2, flush_after=(5,)).with_keys(**EVERYTHING),
        "changes of schedule": case_of(
            BF16, 0.3, 1, 0, schedules=((2, 4, 1), (4, 1, 0), (5, 2, 2), (8, 1, 1))
        ).with_keys(**AUTO, **EVERYTHING),
        "tiny": case_of("fp32", 0.05, 4, 1, model_options={"shapes": ((2, 1), (1,))}),
        "freezing": case_of("fp32", 0.3, 4, 1, model_options={"frozen_in": {0: (2, 4), 3: (3, 100)}}).with_keys(
            **EVERYTHING
        ),
        "int8 moments": case_of("fp32", 0, 1, 0).with_keys(moments_dtype="int8"),
        "int8 moments, tiny": case_of("fp32", 0, 1, 0, model_options={"shapes": ((2, 1), (1,))}).with_keys(
            moments_dtype="int8"
        ),
    }.items()
}
LATE_ONES = OF_ADAMW["S=4, d=1, top-k"]
STEP_BY_STEP = {name: in_stage_3(LATE[name]) for name in ("flushes", "in backward")}

FP16 = Case(precision="16-true", topk_ratio=0, update_interval=1, publish_lag=0, stage=3)
"""Its first steps overflow. The gradients of this model do not depend on the weights."""

# With another learning rate rounding grows: to 2e-6 within 20 steps at 1e-3.
SLOW = OptimizerOptions(lr=3e-4)
NETWORK = Case(model="TiedNet", optimizer=SLOW, steps=20, topk_ratio=0, update_interval=1, publish_lag=0, stage=3)
PLAIN = {
    "tied weights": NETWORK,
    "clipped": replace(NETWORK, max_norm=0.3).with_keys(optimizer_in_backward=False),
    "convolution, embedding": replace(NETWORK, model="SmallNet"),
}
RESUMED = {
    "S=1, d=0": NETWORK,
    "S=4, d=1, top-k": replace(NETWORK, topk_ratio=0.3, update_interval=4, publish_lag=1, strategy_options=EVERYTHING),
}


def cases(folder: Path) -> dict[str, Case]:
    """All that run on several ranks, in the order in which they run."""
    found = {**OF_ADAMW, **STEP_BY_STEP}
    for name, case in PLAIN.items():
        found |= {f"ours: {name}": case, f"plain: {name}": replace(case, stock=True)}
    for name, case in RESUMED.items():
        saved = replace(case, steps=9, checkpoint=str(folder / name))
        found |= {f"saved: {name}": replace(saved, save_at=5), f"resumed: {name}": saved}
    return found | {
        "fp16": FP16,
        "fp16, stage 2": replace(FP16, stage=2),
        "fabric": replace(LATE_ONES, loop="fabric"),
        "states": replace(LATE_ONES, callbacks=(State(folder, read_after=3),)),
        "states in the middle": replace(LATE_ONES, steps=3),
    }


@dataclass(frozen=True)
class Group:
    """The cases of a number of ranks."""

    ranks: int
    folder: Path
    """For what the cases write."""
    runs: Runs

    def __getitem__(self, name: str) -> list[Run]:
        return self.runs[name]


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"ranks{n}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return Group(request.param, folder, run_each(cases(folder), ranks=request.param))


@pytest.mark.parametrize("name", OF_ADAMW)
def test_the_state_is_adamws_to_the_bit(name: str, runs: Group) -> None:
    assert_is_adamw(OF_ADAMW[name], *runs[name])


@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_every_step_is_the_oracles(name: str, runs: Group) -> None:
    compare_with_oracle(STEP_BY_STEP[name], runs[name])


@pytest.mark.parametrize("name", PLAIN)
def test_weights_are_those_of_plain_zero_3(name: str, runs: Group) -> None:
    for ours, plain in zip(runs[f"ours: {name}"], runs[f"plain: {name}"], strict=True):
        for a, b in zip(ours.weights, plain.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
        assert torch.allclose(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(name: str, runs: Group) -> None:
    for saved, resumed in zip(runs[f"saved: {name}"], runs[f"resumed: {name}"], strict=True):
        assert len(resumed.losses) == 4
        assert_same_run(resumed, replace(saved, shown=saved.shown[5:], losses=saved.losses[5:]))


class Sharded(pl.LightningModule):
    """Layers that are divided over the ranks as they are made, so that no rank has ever the whole model."""

    @override
    def configure_model(self) -> None:
        # Lightning asks again before each run.
        if hasattr(self, "layers"):
            return
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3, bias=False))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.layers(batch), batch[:, :3].argmax(1))

    test_step = training_step

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(40, 24, generator=generator(9)), batch_size=4)  # type: ignore[arg-type]

    test_dataloader = train_dataloader


def whole(model: nn.Module) -> list[Tensor]:
    with GatheredParameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def test_a_model_that_is_made_in_pieces_and_is_tested(tmp_path: Path) -> None:
    weights, linear = [], torch.nn.functional.linear
    for strategy in (NETWORK.make_strategy(), replace(NETWORK, stock=True).make_strategy()):
        model = Sharded()
        trainer = make_trainer(strategy, max_epochs=2, limit_test_batches=1)
        trainer.fit(model)
        if not weights:
            assert torch.nn.functional.linear is linear
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        trainer.test(model, verbose=False)
        weights.append(whole(model))
    for ours, plain in zip(*weights, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-6)
    evaluated, resumed = Sharded(), Sharded()
    make_trainer(NETWORK.make_strategy(), limit_test_batches=1).test(
        evaluated, ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    make_trainer(NETWORK.make_strategy(), max_epochs=2).fit(resumed, ckpt_path=tmp_path / "a.ckpt")
    for model in (evaluated, resumed):
        assert_same_tensors(whole(model), weights[0])


def test_fp16_with_a_dynamic_loss_scale_has_the_state_of_stage_2(runs: Group) -> None:
    for ours, theirs in zip(runs["fp16"], runs["fp16, stage 2"], strict=True):
        assert_same_state(ours, theirs)
        assert ours.skipped > 0


def test_fabric_gives_the_same_bits(runs: Group) -> None:
    for ours, theirs in zip(runs["fabric"], runs["S=4, d=1, top-k"], strict=True):
        assert_same_run(ours, theirs)


def test_states_and_gradients_of_whole_parameters(runs: Group) -> None:
    assert_found(LATE_ONES, runs["states"], runs["states in the middle"][0], runs.folder)


@pytest.mark.slow
def test_four_ranks() -> None:
    """More than one piece of a parameter may be padding."""
    names, plain = ("S=4, d=1, top-k", "tiny"), PLAIN["tied weights"]
    runs = run_on_ranks(
        {**{name: OF_ADAMW[name] for name in names}, "ours": plain, "plain": replace(plain, stock=True)}, ranks=4
    )
    for name in names:
        # To rounding: four gradients are added in another order than the oracle's.
        for run in runs[name]:
            assert_close_to_adamw(run, OF_ADAMW[name].adamw(world_size=4))
    for a, b in zip(runs["ours"][0].weights, runs["plain"][0].weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
