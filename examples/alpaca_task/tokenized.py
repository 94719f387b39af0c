"""Records as token ids: prompt, response, end. Only the response is learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from alpaca_task.prompts import Template
from alpaca_task.records import Record
from alpaca_task.tokenizers import Encoder

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is not learned; `cross_entropy` leaves it out by default."""


@dataclass(frozen=True, kw_only=True)
class TokenizedExample:
    """One example."""

    input_ids: list[int]
    prompt_length: int
    """So many of the first tokens are the prompt; at least one token follows."""

    @property
    def labels(self) -> list[int]:
        """The token that each position is to be predicted as: its own for the response, `IGNORED` for the prompt."""
        return [IGNORED] * self.prompt_length + self.input_ids[self.prompt_length :]


def tokenize(
    records: Sequence[Record], template: Template, encoder: Encoder, max_length: int
) -> list[TokenizedExample]:
    """Examples of at most `max_length` tokens.

    Longer ones are cut at their end; they then have no end token, from which the model would learn to stop in mid-sentence. Examples whose
    prompt leaves no room for a response are left out and counted in the log; ValueError if that is all of them.
    """
    prompts = [template.fill(record) for record in records]
    pairs = encoder.encode_pairs(prompts, [record.output for record in records])
    examples = [
        TokenizedExample(input_ids=[*prompt, *response, encoder.end_token_id][:max_length], prompt_length=len(prompt))
        for prompt, response in pairs
        if len(prompt) < max_length
    ]
    left_out = len(records) - len(examples)
    if not examples:
        raise ValueError(f"data.max_length={max_length} is too short: no prompt leaves room for a response")
    if left_out:
        log.warning(
            "%d of %d examples are left out: their prompts fill data.max_length=%d", left_out, len(records), max_length
        )
    return examples
