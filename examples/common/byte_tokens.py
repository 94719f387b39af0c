"""Text as tokens that need no download: UTF-8 bytes are the ids 0 to 255, four special tokens follow."""

from __future__ import annotations

from collections.abc import Iterable

BYTE_TOKENIZER = "bytes"
"""Name of this tokenizer in configurations."""

PAD = 256
START = 257
SEPARATOR = 258
END = 259
VOCAB_SIZE = 260
"""Number of token ids, special tokens included."""


def encode(text: str) -> list[int]:
    """The bytes of `text`, without special tokens."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """The text of `ids` without its special tokens; bytes that are no UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < PAD).decode(errors="replace")
