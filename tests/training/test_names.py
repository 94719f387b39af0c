"""What users write: strategies by name, DeepSpeed's files, several Trainers in a process, as programs use them that wrap Lightning."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.exceptions import MisconfigurationException as LightningsException
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from fabric_runs import launch
from harness import StockStrategy, fit, make_trainer, weights_of
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy
from models import TINY, LinearLossModule
from side_by_side import NOTHING_LATE, Net

NAMES = ("zenflow", "zenflow_adamw")


def test_layers_are_synchronised_where_there_are_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the fit, before the optimizer is made; not by a rank that is alone."""
    done, synchronises = list[str](), mock.Mock(spec=LayerSync)
    for name in ("apply", "revert"):
        getattr(synchronises, name).side_effect = lambda model, name=name: done.append(name) or model

    class Noted(Net):
        @override
        def configure_optimizers(self) -> Any:
            done.append("optimizer")
            return super().configure_optimizers()

    for is_alone in (True, False):
        monkeypatch.setattr(ZenFlowStrategy, "is_alone", is_alone)
        fit(Noted(), ZenFlowStrategy(**NOTHING_LATE), plugins=[synchronises])
    assert done == ["optimizer", "apply", "optimizer", "revert"]


def test_numbers_of_numpy_are_numbers() -> None:
    """As learning rate, from a table of a scheduler, and as a norm."""
    fabric, layer = launch(), torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters(), lr=np.float32(0.5)))
    fabric.backward(model(torch.ones(3, 2)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=np.float32(1)) > 0
    optimizer.step()
    fabric.strategy.teardown()


class Drawn(Net):
    """Notes its batches, and a random number in each step; its optimizer is the Trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = [float(torch.rand(()))]

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(range(20), batch_size=3, shuffle=True)

    val_dataloader = predict_dataloader = train_dataloader

    @override
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.drawn += [batch.tolist(), float(torch.rand(()))]
        return batch[0]

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert optimizer is self.trainer.optimizers[0]


def test_a_seed_gives_the_batches_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has all batches: nothing is distributed, no sampler replaced, and no seed set again."""
    # `seed_everything` leaves them; so they are afterwards as they were.
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")

    def drawn(strategy: str) -> list[Any]:
        seed_everything(1)
        model = Drawn()
        options = {"max_epochs": 2, "use_distributed_sampler": True, "limit_val_batches": 1.0}
        trainer = fit(model, strategy, steps=-1, **options)
        trainer.predict(model)
        assert os.environ["PL_GLOBAL_SEED"] == "1"
        assert strategy == "auto" or torch.distributed.is_initialized()
        return model.drawn

    assert drawn("zenflow") == drawn("auto")


def test_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    FabricStrategy(stall_monitor=True)
    assert "stall_monitor has no effect in a loop" in caplog.text
    for make in (Fabric, Trainer):
        zenflow, adamw = (make(accelerator="cpu", devices=1, strategy=name).strategy for name in NAMES)
        assert zenflow.zenflow_config == ZenFlowConfig()
        assert adamw.zenflow_config == ZenFlowConfig(update_interval=1, publish_lag=0, clip_prediction=False)


def test_a_strategy_object_is_for_one_trainer() -> None:
    """Which may fit, test and fit again with it; another one predicts with options of its own."""
    model, plain = Net(), Net()
    for strategy, module in ((kept := ZenFlowStrategy(**NOTHING_LATE), model), ("auto", plain)):
        trainer = make_trainer(strategy, max_steps=3, gradient_clip_val=0.02)
        trainer.fit(module)
        trainer.test(module, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module)
    assert len(model.losses) == len(plain.losses) > 3 and model.losses == pytest.approx(plain.losses, rel=1e-5)
    predicted = make_trainer("zenflow_adamw").predict(model)
    assert predicted is not None and [float(loss) for loss in predicted] == [float(model.loss(0, 0, 0).detach())]
    with pytest.raises(LightningsException, match="accelerator set through both strategy class and accelerator flag"):
        make_trainer(kept)
    with pytest.raises(
        LightningsException, match="CPU parallel_devices set through ZenFlowStrategy class, but accelerator set"
    ):
        make_trainer(kept, accelerator="auto", devices="auto")


def test_what_the_strategy_was_given_itself_is_kept() -> None:
    with pytest.raises(LightningsException, match="accelerator set through both strategy class and accelerator"):
        make_trainer(ZenFlowStrategy(accelerator=CPUAccelerator()))
    own = type("UsersPrecision", (DeepSpeedPrecision,), {})("bf16-true")
    for plugin in (DeepSpeedPrecision("bf16-true"), own):
        strategy = ZenFlowStrategy(precision_plugin=plugin)
        used = make_trainer(strategy).precision_plugin
        # Lightning's own class only says which precision it is.
        assert used is own if plugin is own else used.precision == "bf16-true"


@pytest.mark.slow  # imports everything anew
def test_the_name_is_known_before_deepspeed_is_imported_and_at_a_prompt() -> None:
    """To Trainer and Fabric. At Python's prompt, as in a notebook, one process trains; several need a file."""
    code = (
        "import sys, lightning_zenflow; assert 'deepspeed' not in sys.modules;"
        "from lightning import Fabric, Trainer; options = dict(strategy='zenflow', accelerator='cpu');"
        "print(*(type(made(devices=1, **options).strategy).__module__ for made in (Trainer, Fabric)));"
        "Trainer(devices=2, **options)"
    )
    command = [sys.executable, "-i", "-c", code]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    assert done.stdout == "lightning_zenflow.strategy lightning_zenflow.fabric\n"
    assert "devices must be 1, got 2" in done.stderr and "%%writefile train.py" in done.stderr


DEEPSPEED_JSON = {
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 1}},
}


def test_deepspeed_json_with_zenflow_optimizer_and_scheduler_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are used instead of `configure_optimizers`, as under DeepSpeedStrategy: one group."""
    path = tmp_path / "zf_config.json"
    path.write_text(json.dumps(DEEPSPEED_JSON))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    seen, models = [], []
    for strategy in (ZenFlowStrategy(overlap_step=False), StockStrategy()):
        models.append(Net())
        (scheduler,) = fit(models[-1], strategy, steps=3).lr_scheduler_configs
        seen.append((scheduler.interval, scheduler.scheduler.get_last_lr()))
    # The first step is at the smallest rate.
    assert seen[0] == seen[1] == ("step", [pytest.approx(1e-2 * 2 / 4)])
    torch.testing.assert_close(*map(weights_of, models), rtol=0, atol=2e-6)


@pytest.mark.parametrize("strategy_class", [ZenFlowStrategy, FabricStrategy])
@pytest.mark.parametrize("is_flat", [True, False])
def test_the_environment_variable_names_a_yaml_file(
    strategy_class: type[Any], is_flat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once, as `config=`: Lightning's own reader knows only JSON. Keywords of ZeRO are not for a config that has ZeRO's keys."""
    path, keys, zero = tmp_path / "zf.yaml", {"topk_ratio": 0.25}, {"stage": 3, "reduce_bucket_size": 12345}
    path.write_text(OmegaConf.to_yaml(keys if is_flat else {"zero_optimization": {**zero, "zenflow": keys}}))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    strategy = strategy_class(**zero if is_flat else {})
    assert strategy.zenflow_config == ZenFlowConfig(topk_ratio=0.25)
    assert zero.items() <= strategy.config["zero_optimization"].items()
    assert not strategy._settings.chooses_buckets
    if not is_flat:
        with pytest.raises(
            LightningsException, match=r"stage must be None or absent, got 3: .* PL_DEEPSPEED_CONFIG_PATH"
        ):
            strategy_class(stage=3)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipping_that_plain_deepspeed_would_do_is_mentioned(
    clip: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fit(LinearLossModule(shapes=TINY), ZenFlowStrategy(config={"bf16": {}}), gradient_clip_val=clip, steps=1)
    assert ("set gradient_clipping to 1.0 for the same, to 0 for none" in caplog.text) == (clip is None)
