"""Runs cases of `harness` under plain `DeepSpeedStrategy(stage=3)` on the CPU; DeepSpeed's own functions give the exact state."""

from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from callbacks import After, At
from harness import Case, Run, make_trainer, snapshot, untrained
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


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[list[Tensor]]]:
    """Runs one rank of a case; `Case.strategy_options` are keys of "zero_optimization"."""
    run, model = Run(), case.make_model()
    parameters = [p for group in model.parameter_groups() for p in group]

    def collect(trainer: pl.Trainer) -> None:
        optimizer = trainer.strategy.deepspeed_engine.optimizer
        run.factors = [1 / optimizer.loss_scale]
        run.counts = [float(state["step"]) for state in optimizer.optimizer.state.values()]
        run.master = [safe_get_full_fp32_param(p).clone() for p in parameters]
        run.exp_avg, run.exp_avg_sq = (
            [safe_get_full_optimizer_state(p, name).clone() for p in parameters] for name in ("exp_avg", "exp_avg_sq")
        )
        run.weights, run.untrained = snapshot(model), untrained(model)

    strategy = PlainStage3(case.strategy_options, fp16=case.dtype == torch.float16)
    trainer = make_trainer(
        strategy,
        devices=devices,
        max_steps=case.steps,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.max_norm,
        precision=case.precision,
        callbacks=[
            # While the engine is there, also where no step is left to do.
            At("on_fit_end", collect),
            After([case.save_at] if case.save_at else [], lambda trainer: trainer.save_checkpoint(case.checkpoint)),
        ],
    )
    trainer.fit(model, ckpt_path=None if case.save_at else case.checkpoint)
    return run, []
