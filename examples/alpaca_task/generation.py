"""Answers to prompts, by greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from alpaca_task.tokenizers import Encoder


def left_pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask (1 for tokens, 0 for padding), int64 [B, L]; the rows end together, where generation goes on."""
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(rows):
        input_ids[index, width - len(ids) :] = torch.tensor(ids)
        attention_mask[index, width - len(ids) :] = 1
    return input_ids, attention_mask


@torch.no_grad()
def answer(
    model: PreTrainedModel, encoder: Encoder, prompts: Sequence[str], *, max_prompt: int, max_new_tokens: int
) -> list[str]:
    """What `model`, in evaluation mode, answers to each of `prompts`.

    Prompts are read from their first `max_prompt` tokens; answers end with the end token, at the latest after `max_new_tokens`.
    """
    rows = [ids[:max_prompt] for ids in encoder.encode_prompts(prompts)]
    input_ids, attention_mask = left_pad(rows, encoder.pad_token_id)
    # The model's own generation settings may ask for random samples.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=encoder.end_token_id,
        pad_token_id=encoder.pad_token_id,
        use_cache=True,
    )
    output = model.generate(
        input_ids.to(model.device), attention_mask=attention_mask.to(model.device), generation_config=settings
    )
    assert isinstance(output, Tensor)
    return [encoder.decode(_until(ids, encoder.end_token_id)) for ids in output[:, input_ids.shape[1] :].tolist()]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids
