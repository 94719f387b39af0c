"""The bundled sample of examples/glue.py: its module, data and configuration.

Fine-tuning begins with a language model, which is trained offline on the sample's training sentences, without their labels, once on each
machine.
"""

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset
from typing_extensions import override

from benchmarks.common.provenance import ROOT
from benchmarks.convergence.initial_weights import PreTraining, pretrainer, trained_once

# `python examples/glue.py` puts its folder on the path; the example is no package.
sys.path.insert(0, str(ROOT / "examples"))

from glue_task.data import Batch, GlueDataModule
from glue_task.module import GlueClassifier

N_HELD_OUT = 600
"""Sentences of the training set that are held out for validation."""
RECIPE = PreTraining(steps=1000)


class SeededGlueData(GlueDataModule):
    """The example's data in an order that depends on the seed alone.

    Validation uses the example's development set, whose combinations of words are all new, and held-out sentences of the training set.
    """

    def __init__(self, *, order_seed: int, **options: object) -> None:
        super().__init__(**options)
        self._generator = torch.Generator().manual_seed(order_seed)
        digest = hashlib.sha256(str(N_HELD_OUT).encode())
        assert self.data_dir is not None
        for file in sorted(Path(self.data_dir).glob("*.tsv")):
            digest.update(file.read_bytes())
        self.sha256 = digest.hexdigest()[:16]

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        loader = super().train_dataloader()
        trained = Subset(loader.dataset, range(len(loader.dataset) - N_HELD_OUT))
        sampler = RandomSampler(trained, generator=self._generator)
        return DataLoader(trained, batch_size=loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)

    @override
    def val_dataloader(self) -> list[DataLoader[Batch]]:
        (development,) = super().val_dataloader()
        sentences = super().train_dataloader().dataset
        held_out = Subset(sentences, range(len(sentences) - N_HELD_OUT, len(sentences)))
        return [
            development,
            DataLoader(held_out, batch_size=development.batch_size, collate_fn=development.collate_fn),
        ]


class MeasuredClassifier(GlueClassifier):
    """The example's model with its own metrics, and the trained objective on held-out sentences.

    The latter in float32: under bf16-true the example's metrics are bfloat16, which is too coarse to compare losses.
    """

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            super().validation_step(batch, batch_idx)
        outputs, hidden = self.model(batch["input_ids"], batch["attention_mask"])
        loss = self._task_loss(outputs.float(), self._labels(batch))
        name = "development_loss_of_labels"
        if dataloader_idx == 1:
            name = "held_out_loss"
            of_text = self.model.language_model_loss(hidden, batch["input_ids"], batch["attention_mask"])
            loss = loss + self.hparams["lm_weight"] * of_text
        self.log(name, loss, batch_size=len(outputs), add_dataloader_idx=False)


class LanguageModel(GlueClassifier):
    """The same network on the language-model loss alone."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, hidden = self.model(batch["input_ids"], batch["attention_mask"])
        return self.model.language_model_loss(hidden, batch["input_ids"], batch["attention_mask"])


def build(cache: Path, *, lr: float, seed: int) -> tuple[pl.LightningModule, SeededGlueData]:
    """Module and data of conf/glue.yaml with the pre-trained transformer, learning rate `lr`, and head weights and order of `seed`."""
    config = OmegaConf.load(ROOT / "conf" / "glue.yaml")
    options = OmegaConf.to_container(config.data, resolve=True)
    assert isinstance(options, dict)
    options["data_dir"] = str(ROOT / config.data.data_dir)
    data = SeededGlueData(order_seed=seed, **options)
    keys = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(keys, dict)
    keys |= {"task": config.data.task, "vocab_size": data.vocab_size, "pad_token_id": data.pad_token_id}
    keys["max_length"] = config.data.max_length
    del keys["lr"]
    torch.manual_seed(RECIPE.seed)
    language_model = LanguageModel(**keys, lr=RECIPE.lr)
    transformer = language_model.model.transformer

    def pretrain() -> None:
        pretrainer(RECIPE).fit(language_model, datamodule=SeededGlueData(order_seed=RECIPE.seed, **options))

    trained_once(cache, "glue", [data.sha256, keys, asdict(RECIPE)], transformer, pretrain)
    torch.manual_seed(seed)
    module = MeasuredClassifier(**keys, lr=lr)
    module.model.transformer.load_state_dict(transformer.state_dict())
    return module, data
