"""Tiny models in folders like those of pretrained ones."""

from pathlib import Path

import pytest
import torch


def _save_tokenizer(folder: Path, texts: list[str], *, special: list[str]) -> int:
    """A small byte-level BPE tokenizer with tokens that start and end a text, as transformers saves it; returns its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts * 20, trainers.BpeTrainer(**options))
    tokens = {"bos_token": special[0], "eos_token": special[-1], "unk_token": special[-1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the pretrained gpt2, with a tiny model and its tokenizer."""
    from transformers import GPT2Config, GPT2Model

    folder = tmp_path_factory.mktemp("tiny_gpt2")
    tokens = _save_tokenizer(folder, ["the plot is dull", "the cast is warm"], special=["<|endoftext|>"])
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tokens, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2Model(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of meta-llama/Llama-2-7b-hf, with a tiny model and a tokenizer without a token for padding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    texts = ["Say this again.", "### Response:", "### Instruction:"]
    tokens = _save_tokenizer(folder, texts, special=["<s>", "</s>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
