"""Weights that runs start from, trained once on each machine and kept."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


def trained_once(cache: Path, name: str, identity: Any, model: nn.Module, train: Callable[[], None]) -> None:
    """Gives a model the weights that `train` leaves in it, from a file if it has been trained before.

    Args:
        cache: folder of the files.
        name: first part of the file's name.
        identity: what the weights depend on, as JSON can hold it; torch's version is added.
        model: changed in place; its state is what is kept.
        train: trains it.
    """
    digest = hashlib.sha256(json.dumps([identity, torch.__version__]).encode()).hexdigest()[:16]
    path = cache / f"{name}-{digest}.pt"
    cache.mkdir(parents=True, exist_ok=True)
    # Of runs that start at the same time, one trains and the others wait for it.
    with open(cache / "pretraining.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            train()
            temporary = path.with_suffix(".part")
            torch.save(model.state_dict(), temporary)
            temporary.rename(path)
    model.load_state_dict(torch.load(path))


def plain_trainer(steps: int) -> pl.Trainer:
    """Trains on the CPU in 32 bits, without any strategy, log or file."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
