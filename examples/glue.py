"""Fine-tune a classifier on a GLUE task under ZenFlow: a small GPT-2, or any pretrained model that `transformers` classifies with.

    python examples/glue.py fit --config conf/glue.yaml
    python examples/glue.py fit --config conf/glue.yaml --model.lr=5e-4 --trainer.max_epochs=2
    python examples/glue.py test --config conf/glue.yaml --ckpt_path=logs/glue/version_0/checkpoints/last.ckpt

The configuration is OmegaConf YAML: `${oc.env:LR,1e-3}` and other resolvers work in it. README.md next to this file has more.
"""

from __future__ import annotations

import logging
import warnings

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_zenflow  # noqa: F401  registers --trainer.strategy=zenflow
from glue_task.data import GlueDataModule
from glue_task.module import GlueClassifier
from glue_task.submission import SubmissionWriter


class GlueCLI(LightningCLI):
    """LightningCLI that tells the model what follows from the data, and adds the writer of submission files."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(SubmissionWriter, "submission")
        parser.link_arguments("data.task", "model.task")
        parser.link_arguments("data.task", "submission.task")
        parser.link_arguments("data.max_length", "model.max_length")
        parser.link_arguments("model.pretrained", "data.pretrained")
        # The tokenizer knows these two, so the data module has to exist before the model.
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data.pad_token_id", "model.pad_token_id", apply_on="instantiate")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    # Of Lightning's own calls, under every strategy.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    GlueCLI(GlueClassifier, GlueDataModule, parser_kwargs={"parser_mode": "omegaconf"})


if __name__ == "__main__":
    main()
