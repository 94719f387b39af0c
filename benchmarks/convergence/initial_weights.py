"""Initial weights of the runs, trained once on each machine and cached."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.common.trainer import quiet_trainer


@dataclass(frozen=True, kw_only=True)
class PreTraining:
    """Pre-training in 32 bits with torch's AdamW."""

    steps: int
    lr: float = 2e-3
    seed: int = 0


def trained_once(cache: Path, name: str, identity: Any, model: nn.Module, train: Callable[[], None]) -> None:
    """Loads the weights that `train` produces; trains if they are not cached.

    Args:
        cache: folder of the files.
        name: first part of the file's name.
        identity: all that the weights depend on, JSON-serialisable; torch's version is added.
        model: changed in place; its state is cached.
        train: trains it.
    """
    digest = hashlib.sha256(json.dumps([identity, torch.__version__]).encode()).hexdigest()[:16]
    path = cache / f"{name}-{digest}.pt"
    cache.mkdir(parents=True, exist_ok=True)
    # Of concurrent runs one trains and the others wait.
    with open(cache / "pretraining.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            train()
            temporary = path.with_suffix(".part")
            torch.save(model.state_dict(), temporary)
            temporary.rename(path)
    model.load_state_dict(torch.load(path))


def pretrainer(recipe: PreTraining) -> pl.Trainer:
    """A trainer on the CPU in 32 bits, without any strategy."""
    return quiet_trainer(max_steps=recipe.steps, limit_val_batches=0, gradient_clip_val=1.0)
