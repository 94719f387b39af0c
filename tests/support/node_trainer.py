"""A rank of a training on several nodes; run as a script that Lightning or torchrun starts, or as a task of SLURM.

Arguments: a folder, the number of steps, and a checkpoint to continue from or "". Saves ``saved.ckpt`` after `SAVED_AT` steps, then writes
the number of its process to ``RANK.pid``. The gradients are those of one rank, whatever their number. Rank 0 writes the result.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from callbacks import After
from harness import make_trainer, snapshot
from lightning_zenflow import ZenFlowStrategy
from models import LinearLossModule

SAVED_AT = 3
KEYS: dict[str, Any] = {"update_interval": 2, "publish_lag": 1, "topk_ratio": 0.3, "worker_cores": 1}


def save(folder: Path, trainer: pl.Trainer) -> None:
    """Saves, and then says that it has."""
    trainer.save_checkpoint(folder / "saved.ckpt")
    written = folder / f"{trainer.global_rank}.tmp"
    written.write_text(str(os.getpid()))
    # Nobody sees a file without the number.
    written.rename(written.with_suffix(".pid"))


def main(folder: Path, steps: int, checkpoint: str) -> None:
    """Trains one rank."""
    torch.set_num_threads(1)
    model = LinearLossModule(ranks_differ=False, length=steps)
    trainer = make_trainer(
        ZenFlowStrategy(**KEYS, timeout=timedelta(seconds=120)),
        num_nodes=int(os.environ["NODES"]),
        devices=int(os.environ["DEVICES"]),
        max_steps=steps,
        callbacks=[] if checkpoint else [After([SAVED_AT], partial(save, folder))],
    )
    trainer.fit(model, ckpt_path=checkpoint or None)
    # A launcher starts ranks once: what it reads that from has stayed.
    trainer.validate(model)
    environment = trainer.strategy.cluster_environment
    if trainer.is_global_zero:
        result = (type(environment).__name__, trainer.world_size, trainer.global_step, snapshot(model))
        torch.save(result, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
