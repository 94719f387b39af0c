"""In how many steps does clipping act? Trains the models of all settings with torch's AdamW, at each learning rate, with seed 1.

    python -m benchmarks.convergence.clipping
    python -m benchmarks.convergence.clipping --settings recall,modular
    PYTHONPATH=. python examples/alpaca.py fit --config conf/alpaca.yaml --trainer.strategy=auto \
        --trainer.callbacks+=benchmarks.convergence.clipping.ClippedSteps --trainer.callbacks.name=alpaca

The last command is alike for `examples/glue.py` with `conf/glue.yaml`. Each training prints a row of docs/convergence.md.
"""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.trainer import quiet_trainer
from benchmarks.convergence.__main__ import CACHE
from benchmarks.convergence.records import Spec
from benchmarks.convergence.run import build
from benchmarks.convergence.settings import SETTINGS


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


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.convergence.clipping", __doc__)
    parser.add_argument(
        "--settings", type=list_of(one_of(SETTINGS, "setting")), default=list(SETTINGS), metavar="NAME,..."
    )
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each setting at each learning rate."""
    torch.set_num_threads(1)
    for name in parse_arguments(arguments).settings:
        setting = SETTINGS[name]
        for lr in setting.lrs:
            module, data = build(Spec(setting=name, method="adamw", lr=lr, seed=1, steps=setting.steps), CACHE)
            torch.manual_seed(1)
            trainer = quiet_trainer(
                max_steps=setting.steps,
                gradient_clip_val=1.0,
                limit_val_batches=0,
                callbacks=[ClippedSteps(f"`{name}`, {lr:g}")],
            )
            trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main()
