"""Tune a language model on instructions in Alpaca's format with TRL's `SFTTrainer`: with `OffloadAdamW`, or, where there is a DeepSpeed
configuration, as for late weights and parameters in host memory, under ZenFlow.

    python examples/sft.py                                                     # a small Llama, the bundled sample
    python examples/sft.py --model Qwen/Qwen2.5-0.5B --train_file alpaca_data.json --deepspeed conf/zf_config.json \\
        --per_device_train_batch_size=32 --learning_rate=2e-5 --weight_decay=0.01

All options of TRL's `SFTConfig` are options here. `pip install 'lightning-zenflow[huggingface]' trl`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, TrlParser

from alpaca_task.prompts import find_template
from alpaca_task.records import read_records
from lightning_zenflow import OffloadAdamW
from lightning_zenflow.transformers import ZenFlowTraining

_SAMPLE = Path(__file__).parent / "data" / "alpaca"


@dataclass
class Options:
    """What is trained on what."""

    model: str = field(default="", metadata={"help": "name or folder; none: a small Llama that reads bytes"})
    template: str = field(default="short", metadata={"help": "of the prompts: short or alpaca"})
    train_file: str = field(default=str(_SAMPLE / "train.json"), metadata={"help": "in Alpaca's format"})
    eval_file: str = field(default=str(_SAMPLE / "val.json"), metadata={"help": "in Alpaca's format"})


class ZenFlowSFTTrainer(ZenFlowTraining, SFTTrainer):
    """TRL's trainer with ZenFlow's optimizer."""


def read_dataset(path: str, template: str) -> Dataset:
    """Prompts, and completions, on which alone the loss is."""
    filled = find_template(template)
    rows = [{"prompt": filled.fill(record), "completion": record.output} for record in read_records(path)]
    return Dataset.from_list(rows)


def small_llama() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A model with random weights, and its tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    special: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), max_position_embeddings=512, **sizes, **special)), fast


def main(arguments: list[str] | None = None) -> SFTTrainer:
    """Trains, evaluates and returns the trainer."""
    parser = TrlParser([Options, SFTConfig])
    defaults = {"output_dir": "sft_output", "learning_rate": 1e-3, "warmup_steps": 100, "report_to": "none"}
    parser.set_defaults(**defaults, eval_strategy="epoch", save_strategy="no", bf16=torch.cuda.is_available())
    options, training = parser.parse_args_and_config(arguments)
    torch.manual_seed(training.seed)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = small_llama()
    train, evaluation = (read_dataset(file, options.template) for file in (options.train_file, options.eval_file))
    data = {"train_dataset": train, "eval_dataset": evaluation, "processing_class": tokenizer}
    if training.deepspeed:
        trainer = ZenFlowSFTTrainer(model, training, **data)
    else:
        optimizer = OffloadAdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
        trainer = SFTTrainer(model, training, **data, optimizers=(optimizer, None))
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
