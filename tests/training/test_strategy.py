"""The public interface: what users write, and what they are told at setup."""

import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch import nn
from typing_extensions import override

from harness import fit
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.config import KEYS
from models import TINY, LinearLossModule

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def linear(**options: Any) -> LinearLossModule:
    return LinearLossModule(shapes=TINY, **options)


def test_by_name() -> None:
    trainer = fit(linear(), "zenflow")
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.zenflow_config == ZenFlowConfig()


def test_the_name_is_known_to_trainer_and_fabric_before_deepspeed_is_imported() -> None:
    code = (
        "import sys, lightning_zenflow; assert 'deepspeed' not in sys.modules;"
        "from lightning import Fabric, Trainer; options = dict(strategy='zenflow', accelerator='cpu', devices=1);"
        "print(*(type(made(**options).strategy).__module__ for made in (Trainer, Fabric)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "lightning_zenflow.strategy lightning_zenflow.fabric\n"


def test_every_key_is_a_keyword() -> None:
    parameters = inspect.signature(ZenFlowStrategy.__init__).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == list(KEYS)


VALUES = {"topk_ratio": 0.25, "update_interval": 3, "moments_dtype": "bfloat16", "timeline": "logs/timeline.json"}


def test_config_and_keywords(tmp_path: Path) -> None:
    path = tmp_path / "zenflow.yaml"
    path.write_text(OmegaConf.to_yaml({"zenflow": VALUES, "deepspeed": {"gradient_clipping": 0.5}}))
    config: Any
    for config in (ZenFlowConfig(**VALUES), path):
        strategy = ZenFlowStrategy(config=config)
        assert strategy.zenflow_config == ZenFlowConfig(**VALUES)
        assert strategy.config["zero_optimization"]["stage"] == 2
        assert ZenFlowStrategy(config=config, topk_ratio=0.75).zenflow_config.topk_ratio == 0.75


def test_deepspeed_options_reach_deepspeed() -> None:
    assert ZenFlowStrategy(reduce_bucket_size=12345).config["zero_optimization"]["reduce_bucket_size"] == 12345


DEEPSPEED_JSON = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.3,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 2,
            "full_warm_up_rounds": 1,
            "overlap_step": True,
        },
    },
}


def test_deepspeed_json_with_zenflow_and_optimizer_blocks_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer block is used instead of `configure_optimizers`, as under DeepSpeedStrategy: one group, no scheduler."""
    path = tmp_path / "zf_config.json"
    path.write_text(json.dumps(DEEPSPEED_JSON))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    model = linear()
    weights = [p.detach().clone() for p in model.parameters()]
    trainer = fit(model, ZenFlowStrategy(), steps=7)
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.zenflow_config.update_interval == 2

    twin = linear()
    theirs = [nn.Parameter(w) for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=0.002, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(7):
        for i, p in enumerate(theirs):
            p.grad = twin.gradient(i, step, 0, 0)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
    for ours, p in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(ours.detach(), p.detach(), rtol=0, atol=1e-6)


class Returns(LinearLossModule):
    """`configure_optimizers` returns what a function makes of the parameters."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__(shapes=TINY)
        self.make = make

    @override
    def configure_optimizers(self) -> Any:
        return self.make(list(self.parameters()))


class ReplacesMemory(pl.Callback):
    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        weight = next(pl_module.parameters())
        weight.data = weight.data.clone()


class OwnAdamW(torch.optim.AdamW):
    """A class that computes who knows what."""


class Manual(LinearLossModule):
    def __init__(self) -> None:
        super().__init__(shapes=((7, 5),))
        self.automatic_optimization = False


class Sparse(LinearLossModule):
    def __init__(self) -> None:
        super().__init__(shapes=((7, 5),))
        self.words = nn.Embedding(5, 3, sparse=True)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stage": 3}, r"zero_optimization.stage must be 2 .*, got 3"),
    ({"offload_parameters": True}, r"offload_parameters must be False or absent, got True: stage 2"),
    ({"offload_optimizer_device": "nvme"}, r"offload_optimizer_device must be 'cpu' or absent, got 'nvme': the states"),
    ({"remote_device": "nvme"}, r"remote_device must be None or absent, got 'nvme': only stage 3"),
    ({"zero_optimization": False}, r"zero_optimization must be True or absent"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ZenFlowStrategy(**options)


REFUSED: dict[str, tuple[Callable[[], LinearLossModule], dict[str, Any], str]] = {
    "a DeepSpeed config in bf16": (
        linear,
        {"strategy": ZenFlowStrategy(config={"bf16": {"enabled": True}})},
        r"bf16.enabled must be False or absent, got True: the Trainer's precision is '32-true'; or set `Trainer\(precision='bf16-mixed'\)`",
    ),
    "lr_find": (linear, {"callbacks": [LearningRateFinder()]}, r"find the learning rate with another strategy"),
    "replaced memory": (
        linear,
        {"callbacks": [ReplacesMemory()]},
        r"weights.0 must keep its memory, got another one since set-up, .* use deepspeed.utils.safe_set_full_fp32_param",
    ),
    "AMSGrad": (
        lambda: Returns(lambda ps: torch.optim.AdamW(ps, amsgrad=True)),
        {},
        r"amsgrad must be False, got True",
    ),
    "a class derived from AdamW": (
        lambda: Returns(OwnAdamW),
        {},
        r"must be exactly one of torch.optim.AdamW, .*OwnAdamW",
    ),
    "two optimizers": (
        lambda: Returns(lambda ps: [torch.optim.AdamW(ps[:1]), torch.optim.AdamW(ps[1:])]),
        {},
        r"must return one optimizer, got several",
    ),
    "no optimizer": (lambda: Returns(lambda ps: None), {}, r"configure_optimizers must return an optimizer, got None"),
    "manual optimization": (Manual, {}, r"automatic_optimization must be True, got False"),
    "sparse embedding": (Sparse, {}, r"words.sparse must be False, got True"),
    "clipping by value": (
        linear,
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        r"clipping gradients by value",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_setup(name: str) -> None:
    make, options, message = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=message):
        fit(make(), **options)


@pytest.mark.parametrize(
    ("config", "clip", "said"),
    [
        ({"bf16": {}}, None, True),
        ({"bf16": {}}, 0.5, False),
        ({"gradient_clipping": 0}, None, False),
        (None, None, False),
    ],
)
def test_clipping_that_plain_deepspeed_would_do_is_mentioned(
    config: Any, clip: float | None, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fit(linear(), ZenFlowStrategy(config=config), gradient_clip_val=clip, steps=1)
    assert ("set gradient_clipping to 1.0 for the same, to 0 for none" in caplog.text) == said


def test_a_core_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"worker_cores must be cores this process may use, which are .*, got \[4000\]"
    ):
        fit(linear(), ZenFlowStrategy(worker_cores=[4000]))
