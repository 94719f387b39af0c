"""Text to token ids: bytes, which need no download, or the tokenizer of a pretrained model from `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common import byte_tokens
from common.loading import PAD_MULTIPLE


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """The tokens of `common.byte_tokens`: a special one each for padding, the start, between a pair and the end."""
    special = {
        "<pad>": byte_tokens.PAD,
        "<start>": byte_tokens.START,
        "<separator>": byte_tokens.SEPARATOR,
        "<end>": byte_tokens.END,
    }
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", pair="<start> $A <separator> $B <end>", special_tokens=list(special.items())
    )
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", model_input_names=inputs)


def pretrained_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model by name or folder; it pads on the side that the model was trained with.

    Models that read their answer from the last token often have none for padding; they get the one that ends a text. ValueError where
    there is none either.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of model.pretrained={name!r} has no pad or eos token; use a model that has"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, firsts: Sequence[str], seconds: Sequence[str] | None, max_length: int
) -> dict[str, Tensor]:
    """Sentences or pairs as what the model takes by name, such as `input_ids` and `attention_mask`; int64 [B, L], L <= `max_length`.

    Of a pair that is too long the longer sentence is cut first, at its end.
    """
    if seconds is not None and not _marks_pairs(tokenizer):
        seconds = [f"{tokenizer.eos_token}{second}" for second in seconds]
    encoded = tokenizer(
        list(firsts),
        None if seconds is None else list(seconds),
        truncation=True,
        max_length=max_length,
        padding=True,
        # Not beyond `max_length`.
        pad_to_multiple_of=math.gcd(PAD_MULTIPLE, max_length),
        return_tensors="pt",
    )
    return dict(encoded)


def _marks_pairs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there is a special token between the sentences of a pair: GPT-2 and Qwen have none."""
    return tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False)
