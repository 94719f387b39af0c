"""Tune a Llama on instructions in Alpaca's format under ZenFlow.

    python examples/alpaca.py fit --config conf/alpaca.yaml
    python examples/alpaca.py fit --config conf/alpaca.yaml --data.packing=false --trainer.precision=bf16-true
    python examples/alpaca.py validate --config conf/alpaca.yaml --ckpt_path=alpaca_output/last.ckpt

The configuration is OmegaConf YAML: `${oc.env:LR,1e-3}` and other resolvers work in it. README.md next to this file has more.
"""

from __future__ import annotations

import logging
import warnings

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_zenflow  # noqa: F401  registers --trainer.strategy=zenflow
from alpaca_task.data import InstructionData
from alpaca_task.module import InstructionTuner


class AlpacaCLI(LightningCLI):
    """LightningCLI that tells the model what follows from the data."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.tokenizer", "model.tokenizer")
        parser.link_arguments("data.max_length", "model.max_length")
        # The tokenizer knows it, so the data module has to exist before the model.
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    # Of Lightning's own calls, under every strategy.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    AlpacaCLI(InstructionTuner, InstructionData, parser_kwargs={"parser_mode": "omegaconf"})


if __name__ == "__main__":
    main()
