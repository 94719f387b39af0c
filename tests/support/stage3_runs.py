"""Plain `DeepSpeedStrategy(stage=3)` on the CPU, and a network whose parameters ranks have pieces of."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_zenflow.deepspeed.environment import RankProcess
from lightning_zenflow.deepspeed.trained_engine import new_engine
from models import TestModule, draw, generator

INITIAL_SCALE_POWER = 7
"""Of fp16's loss scale, in two's; not the default."""


class PiecesNet(TestModule):
    """Sizes that no number of ranks divides, tied weights, a module with two names, buffers, frozen parameters."""

    lr = 3e-3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = nn.Embedding(19, 5)
        self.norm = nn.BatchNorm1d(5)
        self.same = self.norm
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.back = nn.Linear(7, 5)
        self.head = nn.Linear(5, 19)
        self.head.weight = self.embedding.weight
        draw(self, 11)

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        # The same data on every rank: then the gradient's mean does not depend on how many there are.
        tokens = torch.randint(19, (24,), generator=generator(12, step, micro)).to(self.device)
        x = self.norm(self.embedding(tokens))
        logits = self.head(self.back(torch.tanh(self.frozen(x))))
        return functional.cross_entropy(logits.float(), tokens.roll(1))


class PlainStage3(DeepSpeedStrategy):
    """Plain DeepSpeed on the CPU, with any optimizer."""

    def __init__(self, zero: dict[str, Any], *, fp16: bool) -> None:
        config: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        if fp16:
            config["fp16"] = {"enabled": True, "initial_scale_power": INITIAL_SCALE_POWER}
        super().__init__(config={**config, "zero_optimization": {"stage": 3, **zero}})
        self._process = RankProcess()

    @override
    def setup_environment(self) -> None:
        self._process.set_up(self, pl.strategies, super().setup_environment, is_alone=self.num_processes == 1)

    @override
    def teardown(self) -> None:
        super().teardown()
        self._process.end()

    @override
    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        engine = new_engine(model, optimizer, self.config, self.root_device, lr_scheduler)
        return engine, engine.optimizer
