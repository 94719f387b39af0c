"""What DeepSpeed's unit tests for ZenFlow and Lightning's for its DeepSpeed strategy ask, asked of this strategy, in our own words."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Case, StockStrategy, fit, run_here
from lightning_zenflow import ZenFlowStrategy
from models import TINY, LinearLossModule
from side_by_side import Net

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


def test_only_selected_columns_are_updated_at_once() -> None:
    """Selective AdamW: between two publishes the selected columns show every step, the others none."""
    keys = {"full_warm_up_rounds": 0, "select_strategy": "step", "select_interval": 100, "update_interval": 4}
    strategy = ZenFlowStrategy(
        config=deepspeed_config(**keys), weight_prediction=0, provisional_scale=0, publish_lag=3, worker_cores=1
    )
    run = run_here(Case(model_options={"shapes": ((12, 10), (5,))}, steps=9), strategy=strategy)
    steps = list(itertools.pairwise(run.shown[1:]))
    changes = torch.stack([(b[0] != a[0]).all(0) for a, b in steps])
    assert int(changes.all(0).sum()) == 2  # 0.2 of ten columns
    # Vectors are selected entirely.
    assert all((b[1] != a[1]).all() for a, b in steps)


def test_deepspeeds_scheduler_from_the_configuration(tmp_path: Path) -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        **deepspeed_config(update_interval=1, overlap_step=False),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    seen, models = [], []
    for strategy in (ZenFlowStrategy(config=path), StockStrategy(config=path)):
        models.append(Net())
        (scheduler,) = fit(models[-1], strategy, steps=3).lr_scheduler_configs
        seen.append((scheduler.interval, scheduler.scheduler.get_last_lr()))
    # The first step is at the smallest rate.
    assert seen[0] == seen[1] == ("step", [pytest.approx(1e-2 * 2 / 4)])
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_a_strategy_may_be_copied_before_training() -> None:
    """As sweeps do."""
    strategy = ZenFlowStrategy(topk_ratio=0.3, reduce_bucket_size=1234)
    twin = copy.deepcopy(strategy)
    assert (twin.zenflow_config, twin.config) == (strategy.zenflow_config, strategy.config)
    for each in (twin, strategy):
        fit(LinearLossModule(shapes=TINY), each)
