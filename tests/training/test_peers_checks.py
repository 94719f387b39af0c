"""What DeepSpeed's unit tests for ZenFlow and Lightning's for its DeepSpeed strategy ask, asked of this strategy, in our own words."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from typing_extensions import override

from harness import Case, StockStrategy, fit, make_trainer, run_here
from lightning_zenflow import ZenFlowStrategy
from models import TINY, Indexes, LinearLossModule
from reference import adamw_reference
from side_by_side import NOTHING_LATE, Net, assert_same, compare, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def deepspeed_config(**zenflow: Any) -> dict[str, Any]:
    """A configuration as DeepSpeed's documentation of ZenFlow writes it."""
    return {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zenflow": {"topk_ratio": 0.2, "overlap_step": True, **zenflow},
        }
    }


COMBINATIONS = [
    {
        "full_warm_up_rounds": warm_up,
        "offload": offload,
        "select_strategy": strategy,
        "select_interval": select,
        "update_interval": update,
    }
    for (strategy, select, update), warm_up, offload in itertools.product(
        [("auto", "auto", "auto"), ("step", 10, 3), ("epoch", 1, 5)], [0, 3], [False, True]
    )
]


@pytest.mark.parametrize("keys", COMBINATIONS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_every_combination_trains_and_ends_as_adamw(keys: dict[str, Any]) -> None:
    """DeepSpeed's tests of these combinations ask that the loss is finite; under overlap its Adam state is not complete."""
    case = Case(steps=9, max_norm=1.0)
    run = run_here(case, strategy=ZenFlowStrategy(config=deepspeed_config(**keys), worker_cores=1))
    weights, gradients, groups = case.fixed_gradients()
    state = adamw_reference(weights, gradients, groups, max_norm=1.0)
    for i, weight in enumerate(state.weights):
        torch.testing.assert_close(run.master[i].double(), weight, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(run.exp_avg_sq[i].double(), state.exp_avg_sq[i], rtol=1e-5, atol=1e-8)
    assert run.counts == [9, 9]


def test_only_selected_columns_are_updated_at_once() -> None:
    """Selective AdamW: between two publishes the selected columns show every step, the others none."""
    keys = {"full_warm_up_rounds": 0, "select_strategy": "step", "select_interval": 100, "update_interval": 4}
    strategy = ZenFlowStrategy(
        config=deepspeed_config(**keys), weight_prediction=0, provisional_scale=0, publish_lag=3, worker_cores=1
    )
    run = run_here(Case(model_options={"shapes": ((12, 10), (5,))}, steps=9), strategy=strategy)
    matrices = [of_step[0] for of_step in run.shown[1:]]
    changes = torch.stack([(b != a).all(0) for a, b in itertools.pairwise(matrices)])
    always = changes.all(0)
    assert int(always.sum()) == 2  # 0.2 of ten columns
    # Vectors are selected entirely.
    assert all((b[1] != a[1]).all() for a, b in itertools.pairwise(run.shown[1:]))


@pytest.mark.parametrize("offload", [False, True])
def test_selective_adamw_has_the_same_bits_wherever_its_state_lives(offload: bool) -> None:
    keys = {"select_strategy": "step", "select_interval": 2, "update_interval": 2, "offload": offload}
    run = run_here(Case(steps=7), strategy=ZenFlowStrategy(config=deepspeed_config(**keys), worker_cores=1))
    whole = run_here(Case(steps=7, topk_ratio=1))
    for ours, theirs in zip(run.master, whole.master, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"topk_ratio": "a lot"}, "topk_ratio"),
        ({"topk_ratio": 1.5}, "topk_ratio"),
        ({"select_strategy": "never"}, "select_strategy"),
        ({"update_interval": -1}, "update_interval"),
        ({"update_interval": 0}, "update_interval"),
        ({"full_warm_up_rounds": -1}, "full_warm_up_rounds"),
        ({"overlap_step": "maybe"}, "overlap_step"),
        ({"pt_reserved_cores_perc": 2}, "pt_reserved_cores_perc"),
        ({"topk": 0.1}, "topk"),
    ],
)
def test_wrong_values_are_refused_by_their_key(keys: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=error):
        ZenFlowStrategy(config=deepspeed_config(**keys))


def test_deepspeeds_scheduler_from_the_configuration(tmp_path: Path) -> None:
    config = {
        **deepspeed_config(update_interval=1, overlap_step=False),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    seen, models = [], []
    for strategy in (ZenFlowStrategy(config=path), StockStrategy(config=path)):
        models.append(Net())
        trainer = fit(models[-1], strategy, steps=3)
        (scheduler,) = trainer.lr_scheduler_configs
        seen.append((scheduler.interval, scheduler.scheduler.get_last_lr()))
    assert seen[0] == seen[1]
    assert seen[0] == ("step", [pytest.approx(1e-2 * 2 / 4)])  # the first step is at the smallest rate
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_a_configuration_that_is_not_there() -> None:
    with pytest.raises(MisconfigurationException, match="no_such_file.json"):
        ZenFlowStrategy(config="no_such_file.json")


class OwnClipping(Net):
    @override
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Does nothing, and is not what clips."""


def test_the_modules_own_clipping_hook_does_not_clip() -> None:
    """As under DeepSpeedStrategy, where Lightning warns of it: `gradient_clip_val` clips."""
    own = compare(OwnClipping, lambda: {"max_steps": 3, "gradient_clip_val": 0.01}, others=("stock",))
    assert_same(own, train("zenflow", Net, lambda: {"max_steps": 3, "gradient_clip_val": 0.01}))


class Numbers(pl.LightningDataModule):
    """Loaders of a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @override
    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(Indexes(3), batch_size=1)


def test_a_datamodule() -> None:
    data = Numbers()
    trainer = make_trainer(ZenFlowStrategy(**NOTHING_LATE), max_epochs=2)
    trainer.fit(Net(), datamodule=data)
    assert trainer.global_step == 6
    assert data.asked == 1


def test_a_strategy_may_be_copied_before_training() -> None:
    """As sweeps do."""
    strategy = ZenFlowStrategy(topk_ratio=0.3, reduce_bucket_size=1234)
    twin = copy.deepcopy(strategy)
    assert twin.zenflow_config == strategy.zenflow_config
    assert twin.config == strategy.config
    fit(LinearLossModule(shapes=TINY), twin)
    fit(LinearLossModule(shapes=TINY), strategy)
