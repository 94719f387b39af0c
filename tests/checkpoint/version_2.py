"""A small run that the last version with layout 2 of checkpoints (commit 01ec44d) has saved in the middle and then finished.

``data/version_2/`` holds what that version wrote: for each of `RUNS` the checkpoint ``NAME.ckpt`` of step 7 and ``NAME.result.pt``, what
the run had come to in every later step. To write them again, in a checkout of that commit with its worker built:

    python .../tests/checkpoint/version_2.py

All arithmetic of the model is element by element, so that the results do not depend on the machine's matrix kernels.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zenflow import ZenFlowStrategy

DATA = Path(__file__).parent / "data/version_2"

STEPS, SAVED_AT = 18, 7

ACCUMULATE = 2

RUNS: Mapping[str, Mapping[str, Any]] = {
    # Reselects in steps 3, 6, 9, ...: the save meets blocks that still have their old columns.
    "bf16": {"precision": "bf16-true", "update_interval": 4, "publish_lag": 1, "select_interval": 3},
    # Too short for a decision, which would depend on the time that steps take.
    "auto": {"precision": "32-true", "update_interval": "auto", "publish_lag": "auto", "select_interval": "auto"},
}
"""Precision and those keys of the strategy whose names have stayed; the rest have their defaults, under any name."""


class Quadratic(pl.LightningModule):
    """loss = sum of p * (p / 2 + D) over all elements, so that the gradient is p + D; D is random, a function of step and micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(_random(shape, i)) for i, shape in enumerate([(23, 17), (8, 3, 3, 2), (37,), (3, 61), (1,)])
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        micro_batch = ACCUMULATE * self.trainer.global_step + batch_idx % ACCUMULATE
        total = torch.zeros(())
        for i, p in enumerate(self.weights):
            columns = (torch.arange(1, (p.shape[1] if p.dim() > 1 else 1) + 1) / 4).view(-1, *[1] * (p.dim() - 2))
            data = _random(p.shape, 100 * (micro_batch + 1) + i) * columns
            total = total + (p.float() * (0.5 * p.float() + data)).sum()
        return total

    def configure_optimizers(self) -> Any:
        matrices, vectors = ([p for p in self.weights if (p.dim() > 1) == wanted] for wanted in (True, False))
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.07}, {"params": vectors, "betas": (0.8, 0.95), "eps": 1e-6}],
            lr=0.01,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.25 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(ACCUMULATE * STEPS))  # type: ignore[arg-type]


class Hashes(pl.Callback):
    """Keeps a hash of the weights that each step shows; saves a checkpoint after a step, if a path is given."""

    def __init__(self, path: Path | None) -> None:
        self.of_steps: list[str] = []
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.of_steps.append(sha256(list(pl_module.parameters())))
        if self._path is not None and trainer.global_step == SAVED_AT:
            path, self._path = self._path, None
            trainer.save_checkpoint(path)


def sha256(tensors: Sequence[Tensor]) -> str:
    """Of all elements' bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(name: str, *, save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    """Trains one of `RUNS`.

    Returns:
        Weights by name, AdamW's state of each parameter group, and the hashes of the weights after each micro-batch.
    """
    precision, keys = RUNS[name]["precision"], {k: v for k, v in RUNS[name].items() if k != "precision"}
    model, hashes = Quadratic(), Hashes(save)
    trainer = pl.Trainer(
        strategy=ZenFlowStrategy(topk_ratio=0.3, worker_cores=1, **keys),
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=20.0,
        precision=precision,
        callbacks=[hashes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=resume)
    optimizer = trainer.strategy.zenflow_optimizer
    flats = optimizer.single_partition_of_fp32_groups
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "state": [
            {
                "master": flat.detach().clone(),
                **{k: torch.as_tensor(v).clone() for k, v in optimizer.optimizer.state[flat].items()},
            }
            for flat in flats
        ],
        "hashes": hashes.of_steps,
    }


def _random(shape: Sequence[int], seed: int) -> Tensor:
    """Uniform in [-0.5, 0.5): the same on every machine, unlike normal numbers."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


if __name__ == "__main__":
    shutil.rmtree(DATA, ignore_errors=True)
    for name in RUNS:
        whole, path = train(name, save=DATA / f"{name}.ckpt"), DATA / f"{name}.ckpt"
        result = train(name, resume=path)
        assert result["hashes"] == whole["hashes"][ACCUMULATE * SAVED_AT :]
        torch.save(result, DATA / f"{name}.result.pt")
        for script in path.glob("*.py"):  # DeepSpeed's
            script.unlink()
