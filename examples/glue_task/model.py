"""The network: a GPT-2 from `transformers` with a linear head on the last token of the text.

Shapes: B sentences (or pairs), L tokens, W width of the hidden states, V token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model


def build_transformer(
    *, layers: int, width: int, heads: int, dropout: float, vocab_size: int, pad_token_id: int, max_length: int
) -> GPT2Model:
    """A GPT-2 with random weights; ValueError where the heads do not divide the width."""
    if width % heads:
        raise ValueError(f"model.width={width} is not allowed; it must be a multiple of model.heads={heads}")
    config = GPT2Config(
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
    return GPT2Model(config)


def load_transformer(name: str, *, dropout: float, vocab_size: int, pad_token_id: int, max_length: int) -> GPT2Model:
    """A pretrained GPT-2 by name or folder; ValueError where tokenizer or texts do not fit it."""
    config = GPT2Config.from_pretrained(
        name, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, pad_token_id=pad_token_id, use_cache=False
    )
    if config.vocab_size < vocab_size:
        raise ValueError(
            f"model.pretrained={name!r} knows {config.vocab_size} tokens but data.tokenizer has {vocab_size}; "
            f"set data.tokenizer={name!r}"
        )
    if config.n_positions < max_length:
        raise ValueError(
            f"data.max_length={max_length} exceeds the {config.n_positions} positions of model.pretrained={name!r}"
        )
    # The strategy's precision decides in which dtype the weights are trained, not the file they come from.
    # It comes in evaluation mode, in which Lightning would leave it: without dropout.
    return GPT2Model.from_pretrained(name, config=config).float().train()


class Gpt2Classifier(nn.Module):
    """The transformer and a linear head of `num_outputs` values."""

    def __init__(self, transformer: GPT2Model, num_outputs: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = nn.Linear(transformer.config.n_embd, num_outputs)
        nn.init.normal_(self.head.weight, std=transformer.config.initializer_range)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the head, float32 [B, num_outputs], and hidden states [B, L, W].

        `input_ids` and `attention_mask` are int64 [B, L], padded on the right. Attention is causal, so padding on the right changes
        no token before it, and the head reads the last token that the mask holds.
        """
        hidden: Tensor = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(dim=1) - 1
        outputs = self.head(hidden[torch.arange(len(hidden), device=hidden.device), last])
        return outputs.float(), hidden

    def language_model_loss(self, hidden: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Mean cross-entropy of predicting each token from those before it, with the input embedding as output layer."""
        targets = input_ids[:, 1:].masked_fill(attention_mask[:, 1:] == 0, -100)
        logits = nn.functional.linear(hidden[:, :-1], self.transformer.wte.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
