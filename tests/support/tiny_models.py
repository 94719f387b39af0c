"""Tiny models with random weights in folders like those of pretrained ones, for the examples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 32}
_SIZES |= {"initializer_range": 0.2}  # of a usual one, BERT hardly sees its inputs
TINY_MODELS: dict[str, dict[str, Any]] = {
    "bert": {**_SIZES, "intermediate_size": 32},
    "llama": {**_SIZES, "intermediate_size": 40, "num_key_value_heads": 2},
}
"""Architecture -> keys of its configuration."""


def save_tiny_model(
    folder: Path, architecture: str, *, texts: Sequence[str] = ("the plot is dull", "the cast is warm"), **keys: Any
) -> Path:
    """Saves model and tokenizer in bfloat16, and returns the folder.

    Args:
        architecture: of `TINY_MODELS`.
        texts: that the tokenizer has tokens for.
        keys: of the configuration, in place of those of `TINY_MODELS`.
    """
    tokens = _save_tokenizer(folder, architecture, texts)
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**TINY_MODELS[architecture], "vocab_size": tokens, **keys})
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, None
    kind = AutoModelForCausalLM if architecture == "llama" else AutoModel
    kind.from_config(config).bfloat16().save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path, architecture: str, texts: Sequence[str]) -> int:
    """A small byte-level BPE tokenizer with tokens that start and end a text, as transformers saves it; returns its number of tokens."""
    special = ["<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([*texts] * 20, trainers.BpeTrainer(**options))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    more: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
    if architecture == "bert":
        template = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
        ids = [(token, number) for number, token in enumerate(special)]
        tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=ids)
        more = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "pad_token": "</s>"}
    if architecture == "llama":
        more["padding_side"] = "left"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **more)
    fast.save_pretrained(folder)
    return len(fast)
