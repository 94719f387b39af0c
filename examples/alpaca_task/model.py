"""The network: a causal language model from `transformers`, a small Llama with random weights or a pretrained one."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from alpaca_task.tokenized import IGNORED
from common.byte_tokens import BYTE_TOKENIZER


def build_llama(*, layers: int, width: int, heads: int, vocab_size: int, max_length: int) -> PreTrainedModel:
    """A Llama with random weights of torch's default dtype; ValueError where the heads do not divide the width evenly."""
    if width % (2 * heads):
        raise ValueError(
            f"model.width={width} is not allowed; it must be a multiple of twice model.heads={heads}, since positions turn pairs"
        )
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        # The ratio of Llama-2-7b.
        intermediate_size=-(-width * 43 // (16 * 8)) * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_length,
        # Llama's own start and end tokens are others in another tokenizer.
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def load_llama(
    name: str,
    *,
    tokenizer: str,
    vocab_size: int,
    max_length: int,
    attention: str | None,
    stage_3: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A pretrained model by name or folder, in torch's default dtype; ValueError where tokenizer or texts do not fit it.

    `stage_3` is DeepSpeed's configuration where ZeRO stage 3 divides the weights. Each rank then has the whole model in host memory until
    it has divided it; the GPU has one parameter of it at a time.
    """
    config = AutoConfig.from_pretrained(name, use_cache=False)
    bytes_differ = tokenizer == BYTE_TOKENIZER and config.vocab_size != vocab_size
    if bytes_differ or config.vocab_size < vocab_size:
        raise ValueError(
            f"model.pretrained={name!r} knows {config.vocab_size} tokens but data.tokenizer={tokenizer!r} has {vocab_size}; "
            f"set data.tokenizer={name!r}"
        )
    if config.max_position_embeddings < max_length:
        raise ValueError(
            f"data.max_length={max_length} exceeds the {config.max_position_embeddings} positions of model.pretrained={name!r}"
        )
    # Lightning's context asks for weights on the training device; transformers would need the package `accelerate` for that.
    with torch.device("cpu"):
        # In `configure_model` stage 3 divides parameters as they are made, of which transformers knows nothing.
        shutdown_init_context()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=torch.get_default_dtype(), attn_implementation=attention
            )
        finally:
            restore_init_context()
    if stage_3 is not None:
        deepspeed.zero.Init(module=model, config_dict_or_path=stage_3)
    # It comes in evaluation mode, in which Lightning would leave it: without activation checkpointing and dropout.
    return model.train()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let `model` keep only the inputs of its blocks in training and compute the rest again in backward."""
    # DeepSpeed refuses the reentrant kind for layers that are used twice.
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name in older versions of transformers
        model.gradient_checkpointing_enable(options)


def next_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of predicting each label from the tokens before it.

    Args:
        logits: [B, L, V], any floating-point dtype.
        labels: int64 [B, L], `IGNORED` where nothing is learned.

    Returns:
        The loss, a float32 scalar, nan without any label; the logits float32 [B (L - 1), V] and their labels int64 [B (L - 1)].
    """
    predictions = logits[:, :-1].flatten(0, 1).float()
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(predictions, targets, ignore_index=IGNORED), predictions, targets
