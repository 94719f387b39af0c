"""Losses of other libraries' modules beside those under Lightning's own strategy: docs/modules.md.

    python -m benchmarks.modules > docs/modules.md

On the CPU, a minute. Rows of libraries that are not installed are left out, and named on standard error.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.common.results import markdown
from benchmarks.modules.zoo import ZOO, make
from lightning_zenflow import ZenFlowStrategy

STEPS = 12
NOTHING_LATE = {"update_interval": 1, "publish_lag": 0, "optimizer_in_backward": False}
LATE = {"update_interval": 4, "publish_lag": 1}
TOLERANCE = 1e-5
"""Of a loss with nothing late beside the one under strategy="auto", relative. Differences of one rounding grow with each step."""

ABOUT = f"""# Modules of other libraries

Tiny random models, trained for {STEPS} steps of AdamW (lr 2e-3, weight decay 0.1, clipping by a norm of 1) in float32 on a CPU, with the
same data in the same order and the same dropout: under `strategy="auto"`, under `ZenFlowStrategy` with nothing late
(`update_interval=1, publish_lag=0, optimizer_in_backward=False`), and with S = 4, d = 1. *Difference* is the largest of a loss with nothing
late to the one under "auto", relative. `python -m benchmarks.modules > docs/modules.md` writes this file, and fails where it is more than
{TOLERANCE:g}; `tests/benchmarks/test_modules_benchmark.py` runs it.
"""


class Trained(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.module, self.loss = make(name)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(batch_idx)  # dropout
        loss: Tensor = self.loss(self.module, torch.Generator().manual_seed(batch_idx))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3, weight_decay=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(range(STEPS))


def losses(name: str, strategy: Any) -> list[float]:
    """Of each step."""
    model = Trained(name)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model.losses


def row(name: str) -> dict[str, str]:
    """One model.

    Raises:
        ArithmeticError: with nothing late its losses are not those under "auto".
    """
    auto, exact, late = (
        losses(name, strategy) for strategy in ("auto", ZenFlowStrategy(**NOTHING_LATE), ZenFlowStrategy(**LATE))
    )
    difference = max(abs(ours / theirs - 1) for ours, theirs in zip(exact, auto, strict=True))
    if difference > TOLERANCE:
        raise ArithmeticError(f"{name}: losses {exact} instead of {auto}")
    module, _ = make(name)
    return {
        "model": name,
        "trained parameters": f"{sum(p.numel() for p in module.parameters() if p.requires_grad):,}",
        "first loss": f"{auto[0]:.4f}",
        'last loss, "auto"': f"{auto[-1]:.4f}",
        "nothing late": f"{exact[-1]:.4f}",
        "difference": f"{difference:.0e}",
        "S = 4, d = 1": f"{late[-1]:.4f}",
    }


def table(names: list[str]) -> str:
    """Rows of the models whose libraries are installed."""
    rows = []
    for name in names:
        try:
            make(name)
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        rows.append(row(name))
    return markdown(rows)


if __name__ == "__main__":
    found = table(list(ZOO))
    print(f"{ABOUT}\n{found}")
