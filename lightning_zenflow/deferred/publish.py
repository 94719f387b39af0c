"""The way of published weights from the arena into the model."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_zenflow.core.partition import Partition, Piece, ranges_of_block
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.worker.arena import Arena

COPIES_AT_THE_END = "h2d copies"
"""Name of the spans in lane "h2d copies" that nothing hides."""


class PublishedWeights:
    """Copies blocks' new weights from publish buffers into the model: all at once, or a slice at a time while backward goes on.

    Args:
        partition: the rank's partition.
        arena: has the publish buffers.
        weights: for each parameter group, the rank's flat partition of the model's weights, on the device.
        tracer: records the copies.
    """

    def __init__(self, partition: Partition, arena: Arena, weights: Sequence[Tensor], tracer: Tracer) -> None:
        self._arena = arena
        self._weights = weights
        self._tracer = tracer
        self._device = weights[0].device
        # New weights cross PCIe beside the gradients that go the other way, and beside the kernels of backward.
        self._stream: torch.cuda.Stream | None = (
            torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )
        self.use(partition)

    def use(self, partition: Partition) -> None:
        """Copies the ranges of this partition from now on; it differs from the one before in nothing else."""
        self._partition = partition
        self._pieces: list[dict[int, list[Piece]]] = [{} for _ in partition.blocks]
        for number, block in enumerate(partition.blocks):
            for piece in ranges_of_block(partition, block):
                for tile in (partition.tiles[index] for index in block.tiles):
                    begin, end = max(piece.begin, tile.begin), min(piece.begin + piece.numel, tile.end)
                    if begin < end:
                        part = dataclasses.replace(piece, begin=begin, numel=end - begin)
                        self._pieces[number].setdefault(tile.slice, []).append(part)

    def slices_of(self, block: int) -> Set[int]:
        """The slices that a block has a part of, as far as they are trained."""
        return self._pieces[block].keys()

    def copy_in_backward(self, block: int, publish_buffer: int, slices: Collection[int]) -> int:
        """Copies some slices' parts of a block, behind what the current stream has been given so far and beside what comes next.

        Returns:
            The bytes that are copied.
        """
        with self._beside():
            pieces = (piece for index in sorted(slices) for piece in self._pieces[block][index])
            return self._copy(block, publish_buffer, _joined(pieces), "h2d copies, in backward")

    def copy_rest(
        self, block: int, publish_buffer: int, but: Collection[int], after: torch.cuda.Event | None = None
    ) -> int:
        """Copies what is left of a block, but for these slices, in order with the current stream.

        Args:
            block: whose weights.
            publish_buffer: where they are.
            but: slices that are left out.
            after: where there is such a `mark`, what was enqueued between it and this call is not waited for.

        Returns:
            The bytes that are copied.
        """
        pieces = (piece for index, of_slice in self._pieces[block].items() if index not in but for piece in of_slice)
        if after is None:
            return self._copy(block, publish_buffer, _joined(pieces), COPIES_AT_THE_END)
        with self._beside(after):
            n_bytes = self._copy(block, publish_buffer, _joined(pieces), COPIES_AT_THE_END)
        self.wait()
        return n_bytes

    def mark(self) -> torch.cuda.Event | None:
        """The place in the current stream that has been reached; None where the device is the host."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Orders the current stream behind all copies so far; the host waits for nothing."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _beside(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """The stream of its own, behind a `mark`, or behind what the current stream has been given so far."""
        if self._stream is None:
            return nullcontext()
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _copy(self, block: int, publish_buffer: int, pieces: Iterable[Piece], name: str) -> int:
        first = self._partition.blocks[block].begin
        new_weights = self._arena.publish[publish_buffer]
        targets, sources, numel = [], [], 0
        for piece in pieces:
            begin = piece.begin - self._partition.group_begins[piece.index]
            targets.append(self._weights[piece.index].narrow(0, begin, piece.numel))
            sources.append(new_weights.narrow(0, piece.begin - first, piece.numel))
            numel += piece.numel
        n_bytes = numel * new_weights.element_size()
        if targets:
            with self._tracer.span("h2d copies", name, n_bytes=n_bytes):
                torch._foreach_copy_(targets, sources, non_blocking=True)
        return n_bytes


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Ascending pieces, those that follow on one another in one parameter group as one."""
    result: list[Piece] = []
    index = begin = end = -1
    for piece in pieces:
        if piece.index != index or piece.begin != end:
            if index >= 0:
                result.append(Piece(index=index, begin=begin, numel=end - begin))
            index, begin = piece.index, piece.begin
        end = piece.begin + piece.numel
    if index >= 0:
        result.append(Piece(index=index, begin=begin, numel=end - begin))
    return result
