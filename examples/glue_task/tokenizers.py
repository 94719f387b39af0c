"""Text to token ids: our own byte tokenizer, which needs no download, or a pretrained one from `transformers` by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common import byte_tokens


class Encoder(Protocol):
    """What the data module asks of a tokenizer."""

    vocab_size: int
    """Number of token ids, special tokens included."""
    pad_token_id: int

    def encode(self, first: str, second: str | None, max_length: int) -> list[int]:
        """Token ids of a sentence or a pair of sentences: at least one, at most `max_length`."""
        ...


def join_pair(
    first: Sequence[int],
    second: Sequence[int] | None,
    *,
    start: Sequence[int],
    separator: Sequence[int],
    end: Sequence[int],
    max_length: int,
) -> list[int]:
    """`start first [separator second] end`, at most `max_length` long.

    The longer of the two sentences is cut at its end first, so that a long premise does not push out a short hypothesis.
    Raises ValueError where `max_length` does not leave room for one token of each sentence.
    """
    if second is None:
        room = max_length - len(start) - len(end)
        if room < 1:
            raise ValueError(
                f"max_length={max_length} is too short for one sentence; the least is {max_length - room + 1}"
            )
        return [*start, *first[:room], *end]
    room = max_length - len(start) - len(separator) - len(end)
    if room < 2:
        raise ValueError(
            f"max_length={max_length} is too short for a pair of sentences; the least is {max_length - room + 2}"
        )
    kept_first = min(len(first), max(room - len(second), room // 2))
    kept_second = min(len(second), room - kept_first)
    return [*start, *first[:kept_first], *separator, *second[:kept_second], *end]


class ByteEncoder:
    """The tokens of `common.byte_tokens`: padding, start, separator of a pair and end are special ones."""

    pad_token_id = byte_tokens.PAD
    start_token_id = byte_tokens.START
    separator_token_id = byte_tokens.SEPARATOR
    end_token_id = byte_tokens.END
    vocab_size = byte_tokens.VOCAB_SIZE

    def encode(self, first: str, second: str | None, max_length: int) -> list[int]:
        """See `Encoder.encode`."""
        return join_pair(
            byte_tokens.encode(first),
            None if second is None else byte_tokens.encode(second),
            start=[self.start_token_id],
            separator=[self.separator_token_id],
            end=[self.end_token_id],
            max_length=max_length,
        )


class PretrainedEncoder:
    """A tokenizer of `transformers`, by the name of its model or by the path of its folder.

    GPT-2 has one special token, `<|endoftext|>`: it then starts the text, separates a pair and pads. Models with tokens of
    their own for these places use those. Padding is on the right, and the classifier reads the last token that is no padding.
    """

    def __init__(self, name: str) -> None:
        """Load the tokenizer `name`; ValueError where it has no special token to start a text with."""
        # Imported here, so that the byte tokenizer works without it.
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)
        special = self._tokenizer
        start = next(
            (i for i in (special.cls_token_id, special.bos_token_id, special.eos_token_id) if i is not None), None
        )
        if start is None:
            raise ValueError(f"tokenizer={name!r} has no cls, bos or eos token to start a text with; use one that has")
        self._start = [start]
        self._separator = [start if special.sep_token_id is None else special.sep_token_id]
        self._end = [] if special.sep_token_id is None else [special.sep_token_id]
        self.pad_token_id: int = start if special.pad_token_id is None else special.pad_token_id
        self.vocab_size: int = len(special)

    def encode(self, first: str, second: str | None, max_length: int) -> list[int]:
        """See `Encoder.encode`."""
        return join_pair(
            self._ids(first),
            None if second is None else self._ids(second),
            start=self._start,
            separator=self._separator,
            end=self._end,
            max_length=max_length,
        )

    def _ids(self, text: str) -> list[int]:
        # verbose=False: texts longer than the model's context are cut afterwards, so the warning about them would mislead.
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


def build_encoder(name: str) -> Encoder:
    """`ByteEncoder` for "bytes", the pretrained tokenizer `name` otherwise."""
    return ByteEncoder() if name == byte_tokens.BYTE_TOKENIZER else PretrainedEncoder(name)
