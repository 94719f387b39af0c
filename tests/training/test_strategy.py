"""The public interface: what users write."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from omegaconf import OmegaConf

from harness import StockStrategy, fit
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy
from models import TINY, LinearLossModule
from side_by_side import Net


@pytest.mark.slow  # imports everything anew
def test_the_name_is_known_to_trainer_and_fabric_before_deepspeed_is_imported() -> None:
    code = (
        "import sys, lightning_zenflow; assert 'deepspeed' not in sys.modules;"
        "from lightning import Fabric, Trainer; options = dict(strategy='zenflow', accelerator='cpu', devices=1);"
        "print(*(type(made(**options).strategy).__module__ for made in (Trainer, Fabric)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "lightning_zenflow.strategy lightning_zenflow.fabric\n"


DEEPSPEED_JSON = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.01,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 1,
            "full_warm_up_rounds": 1,
            "overlap_step": False,
            "offload": False,
            "auto_ratio": 0.99,
        },
    },
}


def test_deepspeed_json_with_zenflow_optimizer_and_scheduler_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are used instead of `configure_optimizers`, as under DeepSpeedStrategy: one group."""
    path = tmp_path / "zf_config.json"
    path.write_text(json.dumps(DEEPSPEED_JSON))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    seen, models = [], []
    for strategy in (ZenFlowStrategy(), StockStrategy()):
        assert strategy.zenflow_config.update_interval == 1
        models.append(Net())
        (scheduler,) = fit(models[-1], strategy, steps=3).lr_scheduler_configs
        seen.append((scheduler.interval, scheduler.scheduler.get_last_lr()))
    # The first step is at the smallest rate.
    assert seen[0] == seen[1] == ("step", [pytest.approx(1e-2 * 2 / 4)])
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("strategy_class", [ZenFlowStrategy, FabricStrategy])
@pytest.mark.parametrize("deepspeed", [None, {"bf16": {"enabled": True}}])
def test_the_environment_variable_names_a_yaml_file(
    strategy_class: type[Any], deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once, as `config=`: Lightning's own reader knows only JSON. Beside keys of ZenFlow alone, keywords of Lightning count."""
    path = tmp_path / "zf.yaml"
    path.write_text(OmegaConf.to_yaml({"zenflow": {"topk_ratio": 0.25}, "deepspeed": deepspeed}))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    strategy = strategy_class(stage=3)
    assert strategy.zenflow_config == ZenFlowConfig(topk_ratio=0.25)
    assert strategy.config["zero_optimization"]["stage"] == (3 if deepspeed is None else 2)
    assert strategy.config.get("bf16") == (deepspeed or {}).get("bf16")


@pytest.mark.parametrize(("config", "clip", "said"), [({"bf16": {}}, None, True), ({"bf16": {}}, 0.5, False)])
def test_clipping_that_plain_deepspeed_would_do_is_mentioned(
    config: Any, clip: float | None, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fit(LinearLossModule(shapes=TINY), ZenFlowStrategy(config=config), gradient_clip_val=clip, steps=1)
    assert ("set gradient_clipping to 1.0 for the same, to 0 for none" in caplog.text) == said


def test_a_lightning_without_what_is_overridden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeepSpeedStrategy, "_format_config")
    with pytest.raises(RuntimeError, match=r"missing there: \['_format_config'\]\); it is tested with 2.6.6"):
        ZenFlowStrategy()
