"""The bundled sample of examples/glue.py, with its own module, data and configuration."""

import hashlib
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, RandomSampler
from typing_extensions import override

ROOT = Path(__file__).resolve().parent.parent

# `python examples/glue.py` puts its folder on the path; the example is no package.
sys.path.insert(0, str(ROOT / "examples"))

from glue_task.data import Batch, GlueDataModule  # noqa: E402
from glue_task.module import GlueClassifier  # noqa: E402


class SeededGlueData(GlueDataModule):
    """The example's data in an order that depends on the seed alone, whoever else draws random numbers."""

    def __init__(self, *, order_seed: int, **options: object) -> None:
        super().__init__(**options)
        self._generator = torch.Generator().manual_seed(order_seed)
        digest = hashlib.sha256()
        assert self.data_dir is not None
        for file in sorted(Path(self.data_dir).glob("*.tsv")):
            digest.update(file.read_bytes())
        self.sha256 = digest.hexdigest()[:16]

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        loader = super().train_dataloader()
        sampler = RandomSampler(loader.dataset, generator=self._generator)
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)


class MeasuredClassifier(GlueClassifier):
    """The example's model; under bf16-true its own metrics are bfloat16 as well, which is too coarse to compare losses."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        outputs, _ = self.model(batch["input_ids"], batch["attention_mask"])
        loss = self._task_loss(outputs, self._labels(batch))
        self.log("held_out_loss", loss, batch_size=len(outputs), add_dataloader_idx=False)


def build(*, lr: float, seed: int) -> tuple[pl.LightningModule, SeededGlueData]:
    """Module and data as in conf/glue.yaml, but for the learning rate and the seed of the initial weights."""
    config = OmegaConf.load(ROOT / "conf" / "glue.yaml")
    options = OmegaConf.to_container(config.data, resolve=True)
    assert isinstance(options, dict)
    data = SeededGlueData(order_seed=seed, **{**options, "data_dir": str(ROOT / config.data.data_dir)})
    keys = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(keys, dict)
    torch.manual_seed(seed)
    module = MeasuredClassifier(
        task=config.data.task,
        vocab_size=data.vocab_size,
        pad_token_id=data.pad_token_id,
        max_length=config.data.max_length,
        **{**keys, "lr": lr},
    )
    return module, data
