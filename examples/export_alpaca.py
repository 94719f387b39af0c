"""Write a checkpoint of examples/alpaca.py as a folder that `transformers` loads with `from_pretrained`.

    python examples/export_alpaca.py alpaca_output/last.ckpt alpaca_output/model
    python examples/export_alpaca.py alpaca_output/last.ckpt alpaca_output/model --dtype bfloat16

The weights are the float32 master weights, whatever precision the training had; so much host memory is needed. The tokenizer of a
pretrained model is written beside them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.utilities.deepspeed import ds_checkpoint_dir
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from alpaca_task.module import CONFIG_KEY
from common.byte_tokens import BYTE_TOKENIZER

DTYPES = ("float32", "bfloat16", "float16")
MODEL_PREFIX = "model."
"""Of the network's weights in a checkpoint: its attribute in the LightningModule."""


def read_lightning_state(checkpoint: Path) -> dict[str, Any]:
    """What Lightning has put into a checkpoint: hyperparameters and the like; the weights stay on disk."""
    path = checkpoint
    if not path.is_file():
        # Of DeepSpeed's folder; under stage 3 there is one of each rank.
        path = min(Path(ds_checkpoint_dir(str(checkpoint))).glob("*mp_rank_00_model_states.pt"))
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return state


def export(checkpoint: Path, output: Path, dtype: torch.dtype) -> None:
    """Write the weights of `checkpoint` (a file or a folder) in `dtype`, and the tokenizer unless it is ours, to the folder `output`.

    Raises ValueError for a path that is no checkpoint of this example.
    """
    is_folder = (checkpoint / "latest").is_file()
    if not (is_folder or checkpoint.is_file()):
        raise ValueError(f"{checkpoint} is no checkpoint of a training under ZenFlowStrategy")
    state = read_lightning_state(checkpoint)
    if CONFIG_KEY not in state:
        raise ValueError(f"{checkpoint} was not written by examples/alpaca.py")
    config = AutoConfig.for_model(**state[CONFIG_KEY])
    config.use_cache = True
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)) if is_folder else state["state_dict"]
    model.load_state_dict({name.removeprefix(MODEL_PREFIX): weight for name, weight in weights.items()})
    model.save_pretrained(output)
    tokenizer = state["datamodule_hyper_parameters"]["tokenizer"]
    if tokenizer != BYTE_TOKENIZER:
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of examples/alpaca.py as a model of transformers.")
    parser.add_argument("checkpoint", type=Path, help="such as alpaca_output/last.ckpt")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.output, getattr(torch, arguments.dtype))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
