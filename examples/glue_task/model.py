"""The network: a model of `transformers` that classifies sequences, a small GPT-2 with random weights or a pretrained one.

Shapes: B sentences (or pairs), L tokens, W width of the hidden states.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
)


def build_model(
    num_outputs: int,
    *,
    layers: int,
    width: int,
    heads: int,
    dropout: float,
    vocab_size: int,
    pad_token_id: int,
    max_length: int,
) -> PreTrainedModel:
    """A GPT-2 with random weights; ValueError where the heads do not divide the width."""
    if width % heads:
        raise ValueError(f"model.width={width} is not allowed; it must be a multiple of model.heads={heads}")
    config = GPT2Config(
        num_labels=num_outputs,
        vocab_size=vocab_size,
        n_positions=max_length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=pad_token_id,
        # GPT-2's own start and end tokens do not exist in another tokenizer.
        bos_token_id=None,
        eos_token_id=None,
        # GPT-2's gelu_new as one fused operation, which makes a step on a CPU a fifth shorter.
        activation_function="gelu_pytorch_tanh",
        use_cache=False,
    )
    return GPT2ForSequenceClassification(config)


def load_model(name: str, num_outputs: int, *, pad_token_id: int, max_length: int) -> PreTrainedModel:
    """A pretrained model of any architecture that `AutoModelForSequenceClassification` knows, by name or folder, with a fresh head.

    ValueError where texts are too long for it. Decoders read their answer from the last token that is not `pad_token_id`.
    """
    config = AutoConfig.from_pretrained(name, num_labels=num_outputs, pad_token_id=pad_token_id, use_cache=False)
    positions = getattr(config, "max_position_embeddings", max_length)
    if positions < max_length:
        raise ValueError(f"data.max_length={max_length} exceeds the {positions} positions of model.pretrained={name!r}")
    # The strategy's precision decides in which dtype the weights are trained, not the file they come from.
    # It comes in evaluation mode, in which Lightning would leave it: without dropout.
    return AutoModelForSequenceClassification.from_pretrained(name, config=config).float().train()


def language_model_loss(model: PreTrainedModel, hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of predicting each token from those before it, with the input embedding as output layer.

    `hidden` is [B, L, W], behind the last layer of a causal model; `inputs` are padded on the right.
    """
    targets = inputs["input_ids"][:, 1:].masked_fill(inputs["attention_mask"][:, 1:] == 0, -100)
    logits = nn.functional.linear(hidden[:, :-1], model.get_input_embeddings().weight)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
