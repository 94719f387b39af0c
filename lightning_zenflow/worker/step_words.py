"""Words by which the device tells the worker that the gradients of a step, or of a block in a step, have arrived: ``zenflow::StepWord``."""

import ctypes

import torch
from torch import Tensor

from lightning_zenflow.native import protocol

WORD_BYTES = ctypes.sizeof(protocol.StepWord)

# Indices of parts of 4 bytes. That of a field of 8 is its low half, since the protocol is little-endian.
_CLIP, _CHECK, _LOW = (
    field.offset // 4 for field in (protocol.StepWord.clip, protocol.StepWord.check, protocol.StepWord.sequence)
)


class StepWords:
    """A ring of words in host memory, page-locked if the device is to copy to it asynchronously.

    Args:
        rows: [n, at least `WORD_BYTES`] uint8, strided; each row begins with a word.

    Attributes:
        clip: [n] float32, strided; the factor on the gradient.
        sequence: [n] int64, strided; the number of the step whose data has arrived.
    """

    def __init__(self, rows: Tensor) -> None:
        self._words = rows[:, :WORD_BYTES].view(torch.int32)
        self.clip, self.sequence, _ = _fields(self._words)

    def __len__(self) -> int:
        """Number of words."""
        return len(self._words)

    def __getitem__(self, index: int) -> Tensor:
        """The word in place `index` modulo n, [4] int32."""
        return self._words[index % len(self._words)]

    def write(self, index: int, step: int, factor: Tensor) -> None:
        """Copies a word from the factor's device, in one copy and in the order of the current stream. The host does not wait.

        Args:
            index: place of the word, modulo n.
            step: the step's number.
            factor: 0-D float32; not finite: the step changes nothing.
        """
        # New memory each time. The allocator uses it again on this stream only, behind the copy.
        word = torch.empty(WORD_BYTES // 4, dtype=torch.int32, device=factor.device)
        clip, sequence, check = _fields(word)
        clip.copy_(factor)
        sequence.fill_(step)
        torch.bitwise_xor(word[_CLIP], word[_LOW], out=check)
        self[index].copy_(word, non_blocking=True)

    def reset(self) -> None:
        """Makes all words those of no step. No copy of a word may be under way."""
        self.sequence.zero_()


def _fields(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors (float32), sequence numbers (int64) and checks (int32) of words, each [...]; `words` is [..., 4] int32."""
    return (
        words.view(torch.float32)[..., _CLIP],
        words.view(torch.int64)[..., _LOW // 2],
        words[..., _CHECK],
    )
