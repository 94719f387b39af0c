"""Text to token ids and back: bytes, which need no download, or a pretrained tokenizer from `transformers` by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common import byte_tokens


class Encoder(Protocol):
    """What the example asks of a tokenizer."""

    vocab_size: int
    """Number of token ids, special tokens included."""
    pad_token_id: int
    end_token_id: int
    """Ends a response."""

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, with the token that starts a text."""
        ...

    def encode_pairs(self, prompts: Sequence[str], responses: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Token ids of each prompt, as `encode_prompts` has them, and of its response, without the token that ends it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...


class ByteEncoder:
    """The tokens of `common.byte_tokens`."""

    vocab_size = byte_tokens.VOCAB_SIZE
    pad_token_id = byte_tokens.PAD
    end_token_id = byte_tokens.END

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `Encoder.encode_prompts`."""
        return [[byte_tokens.START, *byte_tokens.encode(prompt)] for prompt in prompts]

    def encode_pairs(self, prompts: Sequence[str], responses: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """See `Encoder.encode_pairs`."""
        return list(zip(self.encode_prompts(prompts), map(byte_tokens.encode, responses), strict=True))

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder.decode`."""
        return byte_tokens.decode(ids)


class PretrainedEncoder:
    """A tokenizer of `transformers`, by the name of its model or by the path of its folder."""

    def __init__(self, name: str) -> None:
        """Load the tokenizer `name`; ValueError where it has no token to end a text with."""
        # Imported here, so that the byte tokenizer works without it.
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"data.tokenizer={name!r} has no eos token to end a response with; use one that has")
        self.end_token_id: int = self._tokenizer.eos_token_id
        # Llama has no token for padding. Any will do: padding comes last, has no label and nothing sees it.
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_id if pad is None else pad
        self.vocab_size: int = len(self._tokenizer)
        bos = self._tokenizer.bos_token_id
        self._start = [] if bos is None else [bos]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `Encoder.encode_prompts`."""
        return [[*self._start, *ids] for ids in self._ids(prompts)]

    def encode_pairs(self, prompts: Sequence[str], responses: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """See `Encoder.encode_pairs`.

        A response is cut from the tokens of the whole text, as it is spelled after its prompt. Where a token straddles the border,
        the response is spelled by itself: the prompt must have the tokens that it has in generation.
        """
        wholes = self._ids([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        pairs = []
        for prompt, whole, alone in zip(self._ids(prompts), wholes, self._ids(responses), strict=True):
            response = whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone
            pairs.append(([*self._start, *prompt], response))
        return pairs

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder.decode`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        # verbose=False: what is too long is cut afterwards, so the warning about it would mislead.
        return list(self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])


def build_encoder(name: str) -> Encoder:
    """`ByteEncoder` for "bytes", the pretrained tokenizer `name` otherwise."""
    return ByteEncoder() if name == byte_tokens.BYTE_TOKENIZER else PretrainedEncoder(name)
