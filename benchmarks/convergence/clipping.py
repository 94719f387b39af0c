"""In how many steps does clipping act? A callback for any training:

    PYTHONPATH=. python examples/alpaca.py fit --config conf/alpaca.yaml --trainer.strategy=auto \
        --trainer.callbacks+=benchmarks.convergence.clipping.ClippedSteps --trainer.callbacks.name=alpaca
"""

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override


class ClippedSteps(pl.Callback):
    """Prints the share of clipped steps at the end of a training.

    Args:
        name: of the training.
        max_norm: to which the gradient is clipped.
    """

    def __init__(self, name: str = "example", max_norm: float = 1.0) -> None:
        self._name, self._max_norm = name, max_norm
        self._clipped: list[bool] = []

    @property
    def share(self) -> float:
        """Of the steps that were clipped, so far."""
        return sum(self._clipped) / len(self._clipped)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self._clipped.append(float(torch.nn.utils.get_total_norm(gradients)) > self._max_norm)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        n = len(self._clipped)
        tenth = max(1, n // 10)
        behind = sum(now and not before for before, now in zip(self._clipped, self._clipped[1:], strict=False))
        parts = self._clipped, self._clipped[:tenth], self._clipped[-tenth:]
        shares = [f"{100 * sum(part) / len(part):.1f} %" for part in parts] + [f"{100 * behind / n:.1f} %"]
        print(f"| {self._name} | {n} | {' | '.join(shares)} |", flush=True)
